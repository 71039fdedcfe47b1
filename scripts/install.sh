#!/bin/sh
# Installs moe-proxy from this checkout for one user: a virtual environment, a link to its command and, if asked
# for, a systemd user unit. Says what it will do before it does it. Needs no root.
set -eu

usage() {
  cat << 'END'
Usage: scripts/install.sh [--prefix DIR] [--service] [--dry-run]
       scripts/install.sh --uninstall [--prefix DIR] [--dry-run]

  --prefix DIR   install under DIR instead of ~/.local: DIR/share/moe-proxy/venv and DIR/bin/moe-proxy
  --service      also write the systemd user unit moe-proxy.service; it is neither enabled nor started
  --uninstall    remove what this program installed; settings, models and built engines stay
  --dry-run      say what would be done, and do nothing

PYTHON names another Python than python3. Called again, it brings the installation up to date.
END
}

fail() { printf 'install.sh: %s\n' "$1" >&2; exit "${2:-1}"; }

prefix='' service='' uninstall='' dry_run=''
while [ $# -gt 0 ]; do
  case $1 in
    --prefix) [ $# -gt 1 ] || fail "--prefix needs a folder: see --help" 2; prefix=$2; shift ;;
    --prefix=*) prefix=${1#--prefix=} ;;
    --service) service=yes ;;
    --uninstall) uninstall=yes ;;
    --dry-run) dry_run=yes ;;
    -h | --help) usage; exit 0 ;;
    *) fail "unknown argument $1: see --help" 2 ;;
  esac
  shift
done
[ -n "$prefix" ] || prefix=${HOME:?install.sh: HOME is not set, name a folder with --prefix}/.local
case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
[ "$(printf %s "$prefix" | wc -l)" -eq 0 ] || fail "--prefix has a line break in it" 2

checkout=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=${PYTHON:-python3}
share=$prefix/share/moe-proxy
venv=$share/venv
# What bears this mark was made by this program, and nothing else is ever removed.
mark=$venv/made-by-install.sh
link=$prefix/bin/moe-proxy
unit=${XDG_CONFIG_HOME:-${HOME:-$prefix}/.config}/systemd/user/moe-proxy.service
unit_mark='# Written by scripts/install.sh'

is_our_link() { [ -L "$link" ] && [ "$(readlink "$link")" = "$venv/bin/moe-proxy" ]; }
is_our_unit() { [ -f "$unit" ] && grep -qF "$unit_mark" "$unit" && grep -qF "$(in_unit "$link")" "$unit"; }
# A path as a word of a unit file.
in_unit() { printf '"%s"' "$(printf %s "$1" | sed 's/[\\"]/\\&/g; s/%/%%/g')"; }
say() { printf '%s\n' "$1"; }

if [ -n "$uninstall" ]; then
  [ -z "$service" ] || fail "--service and --uninstall contradict each other" 2
  found=''
  say "This will"
  if is_our_unit; then found=yes; say "  stop the service moe-proxy and remove $unit"; fi
  if is_our_link; then found=yes; say "  remove $link"; fi
  if [ -f "$mark" ]; then found=yes; say "  remove $venv"; fi
  [ -n "$found" ] || { say "  do nothing: there is nothing that this program installed under $prefix"; exit 0; }
  say "and leave settings, models and built engines where they are: ~/.config/moe-proxy, ~/.local/state/moe-proxy,"
  say "~/.local/share/moe-proxy and ~/.cache/moe-proxy, unless you named other folders."
  [ -z "$dry_run" ] || exit 0
  if is_our_unit; then
    # No user session, no service that could run.
    systemctl --user disable --now moe-proxy.service 2> /dev/null || true
    rm -f "$unit"
    systemctl --user daemon-reload 2> /dev/null || true
  fi
  if is_our_link; then rm -f "$link"; fi
  if [ -f "$mark" ]; then rm -rf "$venv"; fi
  rmdir "$share" 2> /dev/null || true
  say "Done."
  exit 0
fi

command -v "$python" > /dev/null || fail "there is no $python: install Python 3.10 or newer (apt-get install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$("$python" --version 2>&1) is too old: moe-proxy needs Python 3.10 or newer; name another with PYTHON=…"
"$python" -c 'import venv, ensurepip' 2> /dev/null || fail "this Python cannot make virtual environments: apt-get install python3-venv"
if [ -e "$venv" ] && [ ! -f "$mark" ]; then
  fail "$venv is there and was not made by this program: move it away, or choose another --prefix"
fi
if { [ -e "$link" ] || [ -L "$link" ]; } && ! is_our_link; then
  fail "$link is there and does not belong to $venv: move it away, or choose another --prefix"
fi
if [ -n "$service" ] && [ -e "$unit" ] && ! grep -qF "$unit_mark" "$unit"; then
  fail "$unit is there and was not written by this program: move it away, or leave --service out"
fi

say "This will"
if [ -f "$mark" ]; then say "  bring up to date    $venv"; else say "  make                $venv (with $("$python" --version 2>&1))"; fi
say "  install into it     moe-proxy from $checkout, and the packages it needs from PyPI"
say "  link                $link"
[ -z "$service" ] || say "  write               $unit"
say "and nothing else. --uninstall takes it back."
[ -z "$dry_run" ] || exit 0

mkdir -p "$share" "$prefix/bin"
mkdir -p "$venv"
: > "$mark"
# Also where a copy is there: it may be of a Python that has been removed since.
"$venv/bin/python" -c '' 2> /dev/null || "$python" -m venv --clear "$venv"
: > "$mark"
# Where somebody watches, pip shows what it does: it takes a while.
quiet=--quiet
[ ! -t 1 ] || quiet=--no-input
"$venv/bin/python" -m pip install $quiet --disable-pip-version-check --upgrade "$checkout"
ln -sfn "$venv/bin/moe-proxy" "$link"
if [ -n "$service" ]; then
  mkdir -p "$(dirname "$unit")"
  {
    say "$unit_mark; change it with: systemctl --user edit moe-proxy"
    command=$(in_unit "$link")
    while IFS= read -r line; do
      case $line in
        ExecStart=*) say "ExecStart=$command start" ;;
        *) say "$line" ;;
      esac
    done < "$checkout/deploy/moe-proxy.service"
  } > "$unit.new"
  mv "$unit.new" "$unit"
  systemctl --user daemon-reload 2> /dev/null || true
fi

say "Installed $("$link" --version)."
case :$PATH: in
  *:"$prefix/bin":*) ;;
  *) say "Your PATH does not have $prefix/bin yet: export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
if ! command -v c++ > /dev/null && ! command -v g++ > /dev/null && ! command -v clang++ > /dev/null; then
  say "There is no C++ compiler: install one (apt-get install g++), or bring an engine with moe-proxy build --import."
fi
[ -z "$service" ] || say "Start the service now and at every login with: systemctl --user enable --now moe-proxy"
