"""The web page's script, run by Node against a document of stand-ins: it reads a stream and draws it without error."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import faser
from faser.controller.config import ObjectivesConfig
from faser.controller.link.ask import ask
from faser.controller.snapshot import encode_snapshot

SCRIPT = Path(faser.__file__).parent / "controller" / "daemon" / "page" / "page.js"
NODE = shutil.which("node")
HARNESS = r"""
const fs = require("fs");
const [script, snapshot] = process.argv.slice(2);
const elements = new Map(), frames = [];
let fills = 0, html = 0;
const pixels = [];
const pen = new Proxy({ createImageData: (width, height) => ({ data: new Uint8ClampedArray(width * height * 4) }),
  putImageData: (image) => pixels.push(image.data.filter((value) => value).length) }, {
  get: (target, name) => name in target ? target[name] : (...numbers) => {
  if (numbers.some((number) => typeof number === "number" && !Number.isFinite(number)))
    throw new Error(`${String(name)} of ${numbers}`);
  fills += name === "fillRect"; } });
const element = () => ({ style: {}, dataset: {}, classList: { toggle() {} }, options: [], children: [], value: "",
  setAttribute() {},
  clientWidth: 400, clientHeight: 200, addEventListener(kind, act) { this[kind] = act; }, getContext: () => pen,
  get childElementCount() { return this.children.length; }, append(...more) { this.children.push(...more); },
  replaceChildren(...more) { this.children = more; this.options = more; }, set innerHTML(text) { html++; } });
Object.assign(globalThis, { window: { devicePixelRatio: 2, matchMedia: () => ({ matches: false }) },
  sessionStorage: { getItem: () => null, setItem() {} },
  Option: function (text, value) { this.textContent = text; this.value = value; },
  requestAnimationFrame: (act) => frames.push(act), setTimeout() {},
  document: { body: element(), querySelectorAll: () => [element()], createElement: element,
    getElementById: (id) => { if (!elements.has(id)) elements.set(id, element()); return elements.get(id); } } });
const chunk = new TextEncoder().encode(`data: ${snapshot}\n\n`), half = chunk.length >> 1;
const parts = [chunk.slice(0, half), chunk.slice(half), chunk];
globalThis.fetch = async () => ({ ok: true, body: { getReader: () => ({
  read: async () => parts.length ? { done: false, value: parts.shift() } : { done: true } }) } });
(0, eval)(fs.readFileSync(script, "utf8"));
setImmediate(() => {
  frames.pop()();
  console.log(JSON.stringify({ fills, html, pixels, state: elements.get("state").textContent,
    overview: elements.get("overview").textContent, reason: elements.get("reason").textContent,
    health: ["sources", "objectives", "lease", "link", "deciding", "about"]
      .map((id) => elements.get(id).children.length),
    split: elements.get("tiles").children.slice(-1)[0].children.map((line) => line.textContent),
    inTime: elements.get("objectives").children.map((row) => row.children.map((cell) => cell.textContent)),
    engines: elements.get("engine").children.map((each) => each.value) }));
});
"""


@pytest.mark.skipif(NODE is None, reason="no Node to run the page's script with")
def test_the_script_reads_a_stream_and_draws_it(
    start_daemon: Any, make_engine: Any, config: Any, tmp_path: Path
) -> None:
    start_daemon(objectives=ObjectivesConfig("interactive:0:300:40, batch:1::400"))
    engine = make_engine()
    engine.hello(copy_max=6, splits=["unsplit", "1:1"])
    for _ in range(3):
        engine.step()
        engine.action()
    harness = tmp_path / "harness.cjs"
    harness.write_text(HARNESS)
    snapshot = encode_snapshot(ask(config.link)).decode()
    assert NODE is not None
    done = subprocess.run([NODE, str(harness), str(SCRIPT), snapshot], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    drawn = json.loads(done.stdout)
    assert drawn["engines"] == ["boot-1"]
    assert drawn["reason"] == "policy fixed:3"
    assert (drawn["html"], drawn["health"]) == (0, [2, 2, 4, 4, 4, 4])
    assert drawn["split"] == ["split", "unsplit", "drafter to target, last step"]
    assert drawn["inTime"] == [["interactive", "0 of 0"], ["batch", "0 of 0"]]
    # two snapshots: a pixel (four values) per request in the heat map, three lines between its lanes; elsewhere a bar
    # per position, five phases per step, and three lines in each of the four scales
    assert drawn["pixels"] == [2 * 4 * 4]
    assert drawn["fills"] == 3 + 6 + 2 * 5 + 4 * 3
