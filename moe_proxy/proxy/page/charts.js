// Owns how numbers are drawn. It fetches nothing, and what is null is a gap and never a 0.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 100;

function svg(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function text(className, content) {
  const element = document.createElement("span");
  element.className = className;
  element.textContent = content;
  return element;
}

function frame(box, shapes, points, top, label) {
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  picture.append(...shapes);
  const parts = [picture];
  if (shapes.length) parts.push(text("top", top));
  else parts.push(text("empty", "no data"));
  if (points.length > 1) {
    const axis = document.createElement("span");
    axis.className = "axis";
    const seconds = Math.round((points.at(-1).time_ms - points[0].time_ms) / 1000);
    axis.append(text("", seconds < 120 ? `${seconds} s ago` : `${Math.round(seconds / 60)} min ago`), text("", "now"));
    parts.push(axis);
  }
  box.replaceChildren(...parts);
}

function across(points) {
  const from = points[0].time_ms;
  const span = Math.max(points.at(-1).time_ms - from, 1);
  return (point) => ((point.time_ms - from) / span) * WIDTH;
}

// A line through value(point); most: the upper end, or null for the greatest value.
export function drawLine(box, points, value, most, format, label) {
  const known = points.map(value).filter((number) => number !== null);
  if (!known.length) return frame(box, [], points, "", `${label}: no data`);
  const top = most ?? Math.max(...known, 1e-9);
  const x = across(points);
  let path = "";
  let pen = false;
  for (const point of points) {
    const number = value(point);
    if (number === null) {
      pen = false;
      continue;
    }
    const y = 1 + (HEIGHT - 2) * (1 - number / top);
    path += `${pen && !point.first ? "L" : "M"}${x(point).toFixed(1)} ${y.toFixed(1)}`;
    // A point without neighbours is a dot.
    if (!pen || point.first) path += "h0.01";
    pen = true;
  }
  frame(box, [svg("path", { d: path })], points, format(top), `${label}: ${format(known.at(-1))}`);
}

// Bars of counts(point) stacked by name; colours gives each name's class.
export function drawBars(box, points, counts, colours, label) {
  const slots = 60;
  const sums = Array.from({ length: slots }, () => new Map());
  if (points.length) {
    const x = across(points);
    for (const point of points) {
      const sum = sums[Math.min(slots - 1, Math.floor((x(point) / WIDTH) * slots))];
      for (const [name, count] of Object.entries(counts(point) ?? {})) sum.set(name, (sum.get(name) ?? 0) + count);
    }
  }
  const top = Math.max(0, ...sums.map((sum) => [...sum.values()].reduce((a, b) => a + b, 0)));
  const shapes = [];
  sums.forEach((sum, slot) => {
    let y = HEIGHT;
    for (const [name, count] of sum) {
      const height = (count / top) * HEIGHT;
      y -= height;
      const bar = svg("rect", { x: (slot * WIDTH) / slots, y, width: WIDTH / slots - 1, height });
      bar.classList.add(colours(name));
      shapes.push(bar);
    }
  });
  frame(box, shapes, points, String(top), label);
}

function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const full = hex.length === 4 ? `#${[...hex.slice(1)].map((digit) => digit + digit).join("")}` : hex;
  return [1, 3, 5].map((at) => parseInt(full.slice(at, at + 2), 16));
}

// One pixel an expert: whether it is resident, and how much the prior wants it, as one colour.
export function drawPlacement(canvas, placement, withPrior) {
  const layers = Object.keys(placement.resident);
  canvas.width = placement.experts;
  canvas.height = layers.length;
  canvas.style.height = `${Math.min(Math.max(layers.length * 6, 72), 420)}px`;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const [absent, missing, resident, wanted] = ["--absent", "--missing", "--resident", "--wanted"].map(colour);
  layers.forEach((layer, row) => {
    const bits = placement.resident[layer];
    const prior = withPrior && placement.prior ? placement.prior[layer] : undefined;
    const most = prior ? Math.max(...prior, 1) : 1;
    for (let expert = 0; expert < placement.experts; expert += 1) {
      const [low, high] = bits[expert] === "1" ? [resident, wanted] : [absent, missing];
      const share = prior ? prior[expert] / most : 0;
      const at = 4 * (row * placement.experts + expert);
      for (let channel = 0; channel < 3; channel += 1) {
        image.data[at + channel] = low[channel] + share * (high[channel] - low[channel]);
      }
      image.data[at + 3] = 255;
    }
  });
  context.putImageData(image, 0, 0);
}
