// The web page: reads snapshots from /events and draws them. What an engine says is only ever set as text, never as HTML.
"use strict";

const SPAN_MS = 60_000; // of the curves
const KEPT = 310; // snapshots of history: that minute at five per second, and a few
const COLUMNS = 150; // of the heat map
const STEPS = 60; // of the phases
const MARGIN = 40; // left of every plot, for its scale
const PHASES = ["schedule_ms", "draft_ms", "verify_ms", "sample_ms", "other_ms"];
const COLOURS = ["#97a3b1", "#e08e2b", "#3b7ddd", "#8e5fd0", "#5b6673"];
const FLAGS = "--scheduler-cls faser.engine_adapter.scheduler.FaserScheduler\n--worker-cls faser.engine_adapter.worker.FaserWorker";
const byId = (id) => document.getElementById(id);
const histories = new Map(); // boot id -> { at, engine, lanes } of each snapshot, oldest first
const darkness = window.matchMedia("(prefers-color-scheme: dark)");
let newest = null;
let drawn = null; // the snapshot on the screen
let chosen = "";
let chosenName = ""; // an engine that restarts comes back under its name, with another boot id

const token = byId("token");
token.value = sessionStorage.getItem("faser-token") || "";
token.addEventListener("change", () => { sessionStorage.setItem("faser-token", token.value); retry(); });
const headers = () => (token.value ? { Authorization: `Bearer ${token.value}` } : {});
let retry = () => {};

async function follow() {
  for (;;) {
    try {
      const reply = await fetch("/events", { headers: headers() });
      if (reply.status === 401) throw new Error("this sidecar wants its token: fill it in above (http.token_file)");
      if (!reply.ok) throw new Error((await reply.json()).error);
      await read(reply.body.getReader());
      show("the stream ended");
    } catch (error) {
      show(error instanceof TypeError ? "no answer from the sidecar" : error.message);
    }
    await new Promise((done) => { retry = done; setTimeout(done, 1000); });
  }
}

async function read(reader) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) take(JSON.parse(part.slice("data: ".length)));
  }
}

function take(snapshot) {
  if (snapshot.error) { show(snapshot.error); return; }
  show("");
  newest = snapshot;
  const at = performance.now();
  for (const engine of snapshot.engines) {
    const history = histories.get(engine.boot_id) || [];
    const before = history.length ? history[history.length - 1].lanes : new Map();
    history.push({ at, engine, lanes: lanesOf(before, engine.last_step ? engine.last_step.handles : []) });
    if (history.length > KEPT) history.shift();
    histories.set(engine.boot_id, history);
  }
  for (const boot of [...histories.keys()]) {
    if (!snapshot.engines.some((engine) => engine.boot_id === boot)) histories.delete(boot);
  }
}

// A request keeps its lane, a row of the heat map, as long as it runs; then the next one takes the lane.
function lanesOf(before, handles) {
  const lanes = new Map(), taken = new Set();
  for (const handle of handles) {
    if (!before.has(handle)) continue;
    lanes.set(handle, before.get(handle));
    taken.add(before.get(handle));
  }
  let free = 0;
  for (const handle of handles) {
    if (lanes.has(handle)) continue;
    while (taken.has(free)) free++;
    lanes.set(handle, free);
    taken.add(free);
  }
  return lanes;
}

// An empty fault: all is well.
function show(fault) {
  byId("state").className = `pill ${fault ? "lost" : "live"}`;
  byId("state").textContent = fault ? "lost" : "live";
  byId("notice").textContent = fault;
  byId("notice").hidden = !fault;
  document.body.classList.toggle("stale", Boolean(fault));
  if (fault && !newest) explain("Nothing to see yet", "The sidecar has not answered. This page tries again every second.", "");
}

function explain(title, text, code) {
  byId("empty-title").textContent = title;
  byId("empty-text").textContent = text;
  if (code) byId("empty-text").append(Object.assign(document.createElement("code"), { textContent: code }));
}

// Drawing follows the screen, not the stream: a hidden page draws nothing, a slow one skips snapshots.
function frame() {
  if (newest && newest !== drawn) { drawn = newest; draw(newest); }
  requestAnimationFrame(frame);
}

function draw(snapshot) {
  const store = snapshot.store;
  const recording = store.error ? `recording STOPPED: ${store.error}` : store.path ? `${count(store.written)} steps recorded${store.pinned_s ? ", a reader pins the log" : ""}` : "not recording";
  byId("overview").textContent =
    `${snapshot.faser_version} · policy ${snapshot.policy} · up ${duration(snapshot.uptime_s)} · ${recording}`;
  choose(snapshot.engines);
  const history = histories.get(chosen);
  document.body.classList.toggle("empty", !history);
  if (!history) {
    explain("No engine yet", "The sidecar is up. An engine shows here once vLLM was started beside it with the two flags", FLAGS);
    return;
  }
  const engine = history[history.length - 1].engine;
  drawMode(engine);
  drawTiles(engine);
  drawHealth(snapshot, engine);
  curves("load", history, [["running", COLOURS[2], (e) => e.running], ["waiting", COLOURS[1], (e) => e.waiting]]);
  curves("goodput", history, [["tokens/s", "#1d9a6c", (e) => e.tokens_per_s]]);
  heat(history, engine.k_max);
  bars(engine.acceptance_by_position);
  phases(history);
}

function choose(engines) {
  const select = byId("engine");
  const names = engines.map((engine) => engine.boot_id);
  if ([...select.options].map((option) => option.value).join("\n") !== names.join("\n")) {
    select.replaceChildren(...engines.map((engine) => new Option(`${engine.steering.name} (${engine.boot_id})`, engine.boot_id)));
  }
  const same = engines.filter((engine) => engine.steering.name === chosenName);
  const held = engines.find((engine) => engine.boot_id === chosen);
  const isOver = !held || ["stopped", "gone"].includes(held.presence);
  const successor = same.find((engine) => !["stopped", "gone"].includes(engine.presence));
  if (isOver && (successor || !held)) choosing((successor || engines[0] || { boot_id: "" }).boot_id, engines);
  select.value = chosen;
}
function choosing(boot, engines) {
  chosen = boot;
  chosenName = engines.filter((engine) => engine.boot_id === boot).map((engine) => engine.steering.name).join("");
}
byId("engine").addEventListener("change", (event) => { choosing(event.target.value, newest.engines); drawn = null; });

const count = (value) => value.toLocaleString("en");
const percent = (share) => (share === null ? "–" : `${(share * 100).toFixed(1)} %`);
const duration = (seconds) => (seconds < 120 ? `${Math.round(seconds)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`);
const listed = (counts) => Object.entries(counts).map(([reason, times]) => `${count(times)} ${reason}`).join(", ") || "none";

function drawMode(engine) {
  const steering = engine.steering, line = byId("mode-line");
  const isHeld = steering.stance !== "steer" || engine.presence === "silent" || engine.presence === "gone";
  line.textContent =
    `${steering.mode}${steering.stance === "steer" ? "" : `, ${steering.stance}: ${steering.reason}`}; engine ${engine.presence}`;
  line.className = isHeld ? "held" : "";
  byId("reason").textContent = engine.reason || "no decision yet";
  byId("reason-source").textContent = engine.decisions ? `number ${count(engine.decisions)}` : "";
  byId("asked").textContent = engine.last_step ? asked(engine.last_step.lengths) : "";
  for (const button of document.querySelectorAll("#modes button")) {
    const isOn = button.dataset.mode === steering.mode;
    button.classList.toggle("on", isOn);
    button.setAttribute("aria-pressed", String(isOn));
  }
}

// In words: how many requests of the last step had which length.
function asked(lengths) {
  const counts = new Map();
  for (const length of lengths) counts.set(length, (counts.get(length) || 0) + 1);
  const parts = [...counts].sort((a, b) => a[0] - b[0]).map(([length, times]) => `${times} × ${length}`);
  return parts.length ? `in force, requests × length: ${parts.join(", ")}` : "no request in the last step";
}

function drawTiles(engine) {
  const steering = engine.steering;
  const tiles = [
    ["running", `${engine.running}`, `${engine.waiting} waiting`],
    ["goodput", engine.tokens_per_s.toFixed(0), "tokens/s"],
    ["steps", `${engine.steps_per_s.toFixed(0)}`, `per s, ${engine.step_ms.toFixed(1)} ms each`],
    ["draft length", engine.mean_draft_length.toFixed(2), `mean, of at most ${engine.k_max}`],
    ["accepted", percent(engine.acceptance_rate), "of verified drafts"],
    ["speed-up", steering.envelope_ratio === null ? "–" : `${steering.envelope_ratio.toFixed(2)} ×`, steering.envelope_ratio === null ? "not measured yet" : "over no speculation"],
    ["KV cache", percent(engine.kv_usage), "in use"],
    ...(engine.split ? [["split", engine.split, "drafter to target, last step"]] : []),
    ...(engine.stages ? [["stages", engine.stages.layers.join("+"), `layers by rank, ${engine.stages.moves} moves${engine.stages.is_moving ? ", moving" : ""}`]] : []),
  ];
  const place = byId("tiles");
  if (place.childElementCount !== tiles.length) {
    place.replaceChildren(...tiles.map(() => {
      const tile = Object.assign(document.createElement("div"), { className: "tile" });
      tile.append(...["span", "b", "span"].map((name) => document.createElement(name)));
      return tile;
    }));
  }
  tiles.forEach((texts, index) => texts.forEach((text, line) => { place.children[index].children[line].textContent = text; }));
}

function drawHealth(snapshot, engine) {
  const steering = engine.steering, link = snapshot.link;
  rows("sources", Object.entries(engine.sources).map(([name, source]) => [
    name, `${percent(source.acceptance_rate)} of ${count(source.verified)} tokens accepted, ${source.waste === null ? "–" : source.waste.toFixed(2)} wasted per token`,
  ]));
  const attained = Object.entries(engine.attainment);
  rows("objectives", attained.length ? attained.map(([name, { finished, in_time: inTime }]) => [
    name, `${count(inTime)} of ${count(finished)}${finished ? `, ${percent(inTime / finished)}` : ""}`,
  ]) : [["none", "nobody has objectives"]]);
  rows("lease", [
    ["in force", engine.lease_age_s === null ? "none: engine's default" : `held, ${(engine.lease_age_s * 1e3).toFixed(0)} ms old`],
    ["steps under it", percent(engine.lease_share)],
    ["not steered", listed(steering.counts)],
    ["record's lag", `${(steering.lag_s * 1e3).toFixed(0)} ms`],
  ]);
  rows("link", [
    ["records", `${count(engine.records)}, ${engine.lost_records} lost in ${engine.gaps} gaps, ${engine.late_records} late`],
    ["frames", `${count(link.received)} in, ${count(link.sent)} out`],
    ["dropped", `${listed(link.dropped)}; ${engine.engine_dropped} by the engine`],
    ["disconnects", `${link.disconnects}`],
  ]);
  rows("deciding", [
    ["decisions", count(engine.decisions)],
    ["time of one", `${engine.decision_us_p50.toFixed(0)} µs p50, ${engine.decision_us_p99.toFixed(0)} µs p99`],
    ["failures", `${engine.failures} deciding, ${engine.sends_dropped} not sent`],
    ["refused", `${engine.engine_rejected} by the engine`],
  ]);
  rows("about", [
    ["model", engine.model],
    ["drafter", `${engine.method} ${engine.drafter}`],
    ["runs on", `vLLM ${engine.vllm_version}, ${engine.device}`],
    ["process", `${engine.pid} on ${engine.host || "this host"}`],
  ]);
}

function rows(id, pairs) {
  byId(id).replaceChildren(...pairs.map((pair) => {
    const row = document.createElement("tr");
    row.append(...pair.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    return row;
  }));
}

// Ink and lines follow the page's theme.
function surface(id, label) {
  const canvas = byId(id);
  const scale = window.devicePixelRatio || 1;
  const wide = canvas.clientWidth, tall = canvas.clientHeight;
  const width = Math.round(wide * scale), height = Math.round(tall * scale);
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  canvas.setAttribute("aria-label", label);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, wide, tall);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  const [ink, faint, card] = darkness.matches ? ["#98a4b3", "#303944", "#1b2128"] : ["#5f6b7a", "#e3e7ed", "#ffffff"];
  return { pen, width: wide, height: tall, ink, faint, card };
}

// The least round number that is no less.
function niceTop(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1e-6)));
  return [1, 2, 3, 4, 6, 8, 10].map((step) => step * unit).find((top) => top >= value * 0.999);
}

function scaleLines({ pen, width, ink, faint }, top, base, ceiling, text) {
  pen.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    const y = base - share * (base - ceiling);
    pen.fillStyle = faint;
    pen.fillRect(MARGIN, Math.round(y), width - MARGIN, 1);
    pen.fillStyle = ink;
    pen.fillText(text(share * top), MARGIN - 6, y + 4);
  }
  pen.textAlign = "left";
}

function curves(id, history, series) {
  const label = series.map(([name, , read]) => `${read(history[history.length - 1].engine).toFixed(0)} ${name}`);
  const view = surface(id, label.join(", "));
  const { pen, width, height, ink } = view;
  const base = height - 16, ceiling = 8, now = history[history.length - 1].at;
  let top = 1;
  for (const { engine } of history) for (const [, , read] of series) top = Math.max(top, read(engine));
  top = niceTop(top);
  scaleLines(view, top, base, ceiling, (value) => (top < 5 ? value.toFixed(1) : value.toFixed(0)));
  const across = (at) => MARGIN + (1 - (now - at) / SPAN_MS) * (width - MARGIN);
  const shown = history.filter(({ at }) => now - at <= SPAN_MS);
  for (const [, colour, read] of series) {
    pen.beginPath();
    shown.forEach(({ at, engine }, place) => {
      const y = base - read(engine) / top * (base - ceiling);
      if (place) pen.lineTo(across(at), y); else pen.moveTo(across(at), y);
    });
    pen.strokeStyle = colour;
    pen.lineWidth = 1.6;
    pen.lineJoin = "round";
    pen.stroke();
    pen.lineTo(width, base);
    pen.lineTo(across(shown[0].at), base);
    pen.globalAlpha = 0.12;
    pen.fillStyle = colour;
    pen.fill();
    pen.globalAlpha = 1;
  }
  pen.fillStyle = ink;
  pen.fillText("60 s ago", MARGIN, height - 3);
  pen.textAlign = "right";
  pen.fillText("now", width, height - 3);
  legend(`${id}-legend`, series.map(([, colour], index) => [colour, label[index]]));
}

// Red, green and blue of a length: grey for none, one hue from faint to full beyond.
function shade(length, longest) {
  const [none, least, most] = darkness.matches
    ? [[44, 52, 61], [33, 66, 116], [154, 200, 255]] : [[229, 233, 238], [196, 217, 246], [16, 58, 128]];
  if (!length) return none;
  const share = longest > 1 ? Math.min((length - 1) / (longest - 1), 1) : 1;
  return least.map((value, index) => Math.round(value + share * (most[index] - value)));
}
const css = (colour) => `rgb(${colour.join(" ")})`;

// A pixel per request and update, made large: one picture instead of thousands of rectangles.
const raster = document.createElement("canvas");
function heat(history, longest) {
  const shown = history.filter(({ engine }) => engine.last_step).slice(-COLUMNS);
  const requests = shown.length ? shown[shown.length - 1].lanes.size : 0;
  const lanes = shown.reduce((most, entry) => Math.max(most, ...entry.lanes.values()), -1) + 1;
  const view = surface("heat", `lengths of ${requests} requests, ${shown.length} updates`);
  const { pen, width, height, ink, card } = view;
  const colours = Array.from({ length: longest + 1 }, (_, length) => shade(length, longest));
  legend("heat-legend", colours.map((colour, length) => [css(colour), length ? `${length}` : "0 tokens"]));
  if (!lanes) { pen.fillStyle = ink; pen.fillText("no request yet", MARGIN, 20); return; }
  raster.width = COLUMNS;
  raster.height = lanes;
  const small = raster.getContext("2d"), image = small.createImageData(COLUMNS, lanes);
  const tall = Math.min(height / lanes, 22), wide = (width - MARGIN) / COLUMNS;
  const ends = []; // where one request follows another in its lane
  shown.forEach(({ engine, lanes: at }, index) => {
    const column = index + COLUMNS - shown.length;
    engine.last_step.handles.forEach((handle, place) => {
      const lane = at.get(handle);
      const [red, green, blue] = colours[Math.min(engine.last_step.lengths[place], longest)];
      image.data.set([red, green, blue, 255], (lane * COLUMNS + column) * 4);
      if (index && !shown[index - 1].lanes.has(handle)) ends.push([column, lane]);
    });
  });
  small.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(raster, MARGIN, 0, width - MARGIN, tall * lanes);
  pen.fillStyle = card;
  for (const [column, lane] of ends) pen.fillRect(Math.round(MARGIN + column * wide) - 1, Math.floor(lane * tall), 1, Math.ceil(tall));
  if (tall >= 4) for (let lane = 1; lane < lanes; lane++) pen.fillRect(MARGIN, Math.round(lane * tall), width - MARGIN, 1);
  pen.fillStyle = ink;
  pen.textAlign = "right";
  const apart = Math.max(1, Math.ceil(28 / tall));
  for (let lane = 0; lane < lanes; lane += apart) pen.fillText(`${lane + 1}`, MARGIN - 6, (lane + 0.5) * tall + 4);
}

function bars(shares) {
  const told = shares.map((share) => (share === null ? "–" : share.toFixed(2)));
  const view = surface("positions", told.join(" "));
  const { pen, width, height, ink } = view;
  const base = height - 16, ceiling = 16, step = (width - MARGIN) / Math.max(shares.length, 1);
  scaleLines(view, 1, base, ceiling, (value) => value.toFixed(1));
  pen.textAlign = "center";
  shares.forEach((share, index) => {
    const tall = (share || 0) * (base - ceiling), middle = MARGIN + (index + 0.5) * step, thick = Math.min(step * 0.62, 56);
    pen.fillStyle = COLOURS[2];
    pen.fillRect(middle - thick / 2, base - tall, thick, tall);
    pen.fillStyle = ink;
    pen.fillText(told[index], middle, base - tall - 4);
    pen.fillText(`${index + 1}`, middle, height - 3);
  });
}

function phases(history) {
  const shown = history.map(({ engine }) => engine.last_step).filter(Boolean).slice(-STEPS);
  const last = shown[shown.length - 1];
  const names = PHASES.map((phase) => phase.replace("_ms", ""));
  const label = last ? PHASES.map((phase, index) => `${names[index]} ${last[phase].toFixed(1)}`) : names;
  const view = surface("phases", label.join(", "));
  const { pen, width, height } = view;
  const base = height - 4, ceiling = 8, slot = (width - MARGIN) / STEPS;
  const sum = (step) => PHASES.reduce((total, phase) => total + step[phase], 0);
  const top = niceTop(shown.reduce((most, step) => Math.max(most, sum(step)), 0.1));
  scaleLines(view, top, base, ceiling, (value) => (top < 5 ? value.toFixed(1) : value.toFixed(0)));
  shown.forEach((step, place) => {
    let y = base;
    PHASES.forEach((phase, index) => {
      const tall = step[phase] / top * (base - ceiling);
      y -= tall;
      pen.fillStyle = COLOURS[index];
      pen.fillRect(MARGIN + (place + STEPS - shown.length) * slot, y, slot - 1, tall);
    });
  });
  legend("phase-legend", PHASES.map((phase, index) => [COLOURS[index], label[index]]));
}

function legend(id, entries) {
  const place = byId(id);
  if (place.childElementCount !== entries.length) {
    place.replaceChildren(...entries.map(() => {
      const entry = document.createElement("span");
      entry.append(Object.assign(document.createElement("span"), { className: "key" }), document.createElement("span"));
      return entry;
    }));
  }
  entries.forEach(([colour, text], index) => {
    const [key, words] = place.children[index].children;
    key.style.background = colour;
    if (words.textContent !== text) words.textContent = text;
  });
}

byId("modes").addEventListener("click", async (event) => {
  const mode = event.target.dataset.mode;
  if (!mode || !chosen) return;
  const answer = byId("mode-answer");
  answer.textContent = "switching";
  try {
    const reply = await fetch("/mode", { method: "POST", headers: headers(), body: JSON.stringify({ mode, engine: chosen }) });
    const body = await reply.json();
    answer.textContent = body.error || `switched to ${mode}`;
    if (!body.error) take(body);
  } catch (error) {
    answer.textContent = error.message;
  }
});

follow();
requestAnimationFrame(frame);
