// Owns the page: asks the proxy for its events, and says what each of them brings.
// What it shows comes from others (names of models, reasons, routes): it is only ever put in as text.

import { drawBars, drawLine, drawPlacement } from "./charts.js";

const KEPT_POINTS = 600;
const SILENT_MS = 10_000;
const KEY = "moe-proxy-key";
const DASH = "–";

const at = (id) => document.getElementById(id);
const put = (id, content) => { at(id).textContent = content; };

let points = [];
let stats = null;
let placement = null;
let heardMs = 0;
const colourOf = new Map();

function bytes(size) {
  if (size === null || size === undefined) return DASH;
  let amount = size;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (amount < 1024) return `${amount.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    amount /= 1024;
  }
  return `${amount.toFixed(1)} TiB`;
}
const number = (value, digits = 1) => (value === null || value === undefined ? DASH : value.toFixed(digits));
const percent = (share) => (share === null || share === undefined ? DASH : `${(100 * share).toFixed(1)} %`);
const perSecond = (size) => (size === null || size === undefined ? DASH : `${bytes(size)}/s`);

function seconds(value) {
  if (value === null || value === undefined) return DASH;
  return value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`;
}
function duration(value) {
  if (value < 120) return `${Math.round(value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}
function colour(domain) {
  if (!colourOf.has(domain)) colourOf.set(domain, `d${colourOf.size % 8}`);
  return colourOf.get(domain);
}
function rows(id, cells, none) {
  const made = cells.map((row) => {
    const line = document.createElement("tr");
    for (const cell of row) line.insertCell().textContent = cell;
    return line;
  });
  if (!made.length) {
    const line = document.createElement("tr");
    line.insertCell().textContent = none;
    made.push(line);
  }
  at(id).replaceChildren(...made);
}

function showHead() {
  const { engine, model, requests, prior } = stats;
  put("model", model.name);
  put("facts", `${model.architecture}, ${model.layers} layers of ${model.experts} experts, ${model.experts_used} used for a token`);
  const loading = engine.progress === null || engine.state === "ready" ? "" : ` ${percent(engine.progress)}`;
  put("state", engine.state + loading);
  const good = engine.state === "ready" || engine.state === "asleep";
  at("state").className = `pill ${good ? "good" : engine.state === "crashed" || engine.state === "failed" ? "bad" : ""}`;
  put("since", `for ${duration(engine.since_s)}; restarts: ${engine.restarts}; proxy up ${duration(stats.uptime_s)}`);
  put("active", requests.active);
  put("totals", `in flight; ${requests.total} done, ${requests.failed} failed`);
  put("prior", stats.pager ? `Prior: ${prior.id ?? "none yet"}, ${prior.pushed} pushed; router map: ${prior.map ?? "none"}` : "");
  const remarks = [...stats.remarks, ...(placement?.remarks ?? [])].map((remark) => {
    const item = document.createElement("li");
    item.className = remark.level;
    item.textContent = remark.text;
    return item;
  });
  at("remarks").replaceChildren(...remarks);
}

function showCharts() {
  const last = points.at(-1);
  put("tokens", number(last.tokens_per_s));
  put("hit-rate", percent(last.hit_rate));
  put("miss-bytes", perSecond(last.miss_bytes_per_s));
  put("hit-rate-now", percent(last.hit_rate));
  put("miss-now", perSecond(last.miss_bytes_per_s));
  put("tokens-now", number(last.tokens_per_s));
  drawLine(at("hit-rate-chart"), points, (point) => point.hit_rate, 1, percent, "Hit rate");
  drawLine(at("miss-chart"), points, (point) => point.miss_bytes_per_s, null, perSecond, "Misses per second");
  drawLine(at("tokens-chart"), points, (point) => point.tokens_per_s, null, number, "Tokens per second");
  drawBars(at("domains-chart"), points, (point) => point.domains, colour, "Domains of requests");
  const legend = Object.entries(stats.requests.domains).map(([name, count]) => {
    const item = document.createElement("li");
    const key = document.createElement("span");
    key.className = `key ${colour(name)}`;
    item.append(key, `${name} ${count}`);
    return item;
  });
  at("domains-legend").replaceChildren(...legend);
}

function bar(label, whole, ...parts) {
  const box = document.createElement("div");
  box.className = "bar";
  parts.forEach((part, index) => {
    const piece = document.createElement("div");
    piece.style.width = `${whole ? Math.min(100, (100 * part) / whole) : 0}%`;
    if (index) piece.className = "second";
    box.append(piece);
  });
  const caption = document.createElement("div");
  caption.textContent = label;
  return [caption, box];
}

function showMemory() {
  const { experts, engine } = stats;
  const shown = [];
  const { vram, ram } = experts?.tiers ?? {};
  if (vram) {
    const label = `VRAM: ${bytes(vram.arena_bytes)} of frames, ${bytes(vram.staging_bytes)} of staging`;
    shown.push(...bar(label, vram.arena_bytes + vram.staging_bytes, vram.arena_bytes, vram.staging_bytes));
    const held = `Experts in frames: ${bytes(experts.resident_bytes)} (${experts.resident_experts} of ${ram.experts})`;
    shown.push(...bar(held, vram.arena_bytes, experts.resident_bytes));
    shown.push(...bar(`RAM: ${bytes(ram.total_bytes)} of experts (${ram.home}), ${bytes(ram.locked_bytes)} locked`, ram.total_bytes, ram.locked_bytes));
  } else if (ram) {
    const label = `RAM: ${bytes(ram.resident_bytes)} of a budget of ${bytes(ram.budget_bytes)}; ${ram.resident_experts} of ${ram.experts} experts`;
    shown.push(...bar(label, ram.budget_bytes, ram.resident_bytes));
    shown.push(...bar(`All experts: ${bytes(ram.total_bytes)}, ${bytes(ram.locked_bytes)} locked`, ram.total_bytes, ram.resident_bytes));
  }
  const process = document.createElement("div");
  const inVram = engine.vram_bytes === null ? "" : `, ${bytes(engine.vram_bytes)} in VRAM`;
  process.textContent = `llama-server's process: ${bytes(engine.rss_bytes)} in RAM, mapped files included${inVram}; ${bytes(engine.read_bytes)} read from disk`;
  at("memory").replaceChildren(...shown, process);
}

function showTables() {
  const { latency, in_flight: running, recent } = stats;
  const line = (name, found) => [name, seconds(found.p50), seconds(found.p95), seconds(found.p99), found.count];
  rows("latency", [line("first token", latency.first_token_s), line("whole answer", latency.duration_s)]);
  const speed = points.at(-1).request_tokens_per_s;
  rows("in-flight", running.map((request) => [
    request.domain ?? DASH, request.path, number(speed[request.id]), request.tokens ?? DASH, number(request.seconds),
  ]), "none");
  rows("recent", recent.slice(-10).reverse().map((request) => [
    request.domain ?? DASH, request.path, request.picks ? percent(request.hits / request.picks) : DASH,
    stats.pager ? request.tokens : DASH, number(request.seconds, 2),
  ]), "none yet");
}

function showPlacement() {
  at("placement").hidden = placement === null;
  at("no-placement").hidden = placement !== null;
  if (placement !== null) drawPlacement(at("heat"), placement, at("overlay").checked);
}

function show() {
  at("main").hidden = false;
  showHead();
  showCharts();
  showMemory();
  showTables();
}

function pointAt(event) {
  if (placement === null) return;
  const box = at("heat").getBoundingClientRect();
  const layers = Object.keys(placement.resident);
  const row = Math.min(layers.length - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * layers.length)));
  const expert = Math.min(placement.experts - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * placement.experts)));
  const where = placement.resident[layers[row]][expert] === "1" ? "resident" : "not resident";
  const prior = placement.prior?.[layers[row]];
  const wanted = prior ? `, prior ${(prior[expert] / 10).toFixed(1)} % of tokens` : "";
  put("heat-text", `Layer ${layers[row]}, expert ${expert}: ${where}${wanted}`);
}

function take(update) {
  points.push(...update.points);
  points = points.slice(-KEPT_POINTS);
  stats = update.stats;
  heardMs = performance.now();
  if ("placement" in update) {
    placement = update.placement;
    showPlacement();
  }
  show();
}

class Refused extends Error {}

async function watch() {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch("/dashboard/events", { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  if (answer.status === 401) throw new Refused();
  if (!answer.ok) throw new Error(`the proxy answered with ${answer.status}`);
  at("key-form").hidden = true;
  put("link", "");
  points = [];
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the proxy ended the connection");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) take(JSON.parse(event.slice(6)));
  }
}

// Resolves with the key that was typed in.
function askForKey() {
  const form = at("key-form");
  put("key-error", sessionStorage.getItem(KEY) ? "This key is wrong." : "");
  put("state", "locked");
  at("main").hidden = true;
  form.hidden = false;
  at("key").focus();
  return new Promise((resolve) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      resolve(at("key").value.trim());
      at("key").value = "";
    }, { once: true });
  });
}

async function run() {
  let waitMs = 1000;
  for (;;) {
    const beganMs = performance.now();
    try {
      await watch();
    } catch (error) {
      if (error instanceof Refused) {
        sessionStorage.setItem(KEY, await askForKey());
        continue;
      }
      if (performance.now() - beganMs > 10_000) waitMs = 1000;
      put("link", `No connection (${error.message}); trying again. What is shown is old.`);
      await new Promise((resolve) => setTimeout(resolve, waitMs));
      waitMs = Math.min(2 * waitMs, 10_000);
    }
  }
}

at("heat").addEventListener("pointermove", pointAt);
at("heat").addEventListener("pointerdown", pointAt);
at("overlay").addEventListener("change", showPlacement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showPlacement);
setInterval(() => {
  const quietMs = performance.now() - heardMs;
  if (heardMs && !at("link").textContent && quietMs > SILENT_MS) put("since", `nothing heard for ${Math.round(quietMs / 1000)} s`);
}, 1000);
run();
