// The web page: reads snapshots from /events and draws them. What an engine says is only ever set as text, never as HTML.
"use strict";

const KEPT = 300; // snapshots of history, one minute at five per second
const PHASES = ["schedule_ms", "draft_ms", "verify_ms", "sample_ms", "other_ms"];
const COLOURS = ["#8d99a6", "#e08e2b", "#2667c9", "#7a4fb5", "#b9c2cc"];
const byId = (id) => document.getElementById(id);
const histories = new Map(); // boot id -> snapshots, oldest first
let newest = null;
let drawn = null; // the snapshot on the screen
let chosen = "";

const token = byId("token");
token.value = sessionStorage.getItem("faser-token") || "";
token.addEventListener("change", () => { sessionStorage.setItem("faser-token", token.value); });
const headers = () => (token.value ? { Authorization: `Bearer ${token.value}` } : {});

async function follow() {
  for (;;) {
    try {
      const reply = await fetch("/events", { headers: headers() });
      if (!reply.ok) throw new Error((await reply.json()).error);
      await read(reply.body.getReader());
      show("lost", "stream ended");
    } catch (error) {
      show("lost", error.message || "no answer");
    }
    await new Promise((done) => setTimeout(done, 1000));
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
  if (snapshot.error) { show("lost", snapshot.error); return; }
  show("live", "live");
  newest = snapshot;
  for (const engine of snapshot.engines) {
    const history = histories.get(engine.boot_id) || [];
    history.push(engine);
    if (history.length > KEPT) history.shift();
    histories.set(engine.boot_id, history);
  }
  for (const boot of [...histories.keys()]) {
    if (!snapshot.engines.some((engine) => engine.boot_id === boot)) histories.delete(boot);
  }
}

function show(kind, text) {
  byId("state").className = `pill ${kind}`;
  byId("state").textContent = text;
}

// Drawing follows the screen, not the stream: a hidden page draws nothing, a slow one skips snapshots.
function frame() {
  if (newest && newest !== drawn) { drawn = newest; draw(newest); }
  requestAnimationFrame(frame);
}

function draw(snapshot) {
  const store = snapshot.store;
  const recording = store.error ? `recording STOPPED: ${store.error}` : store.path ? `${store.written} recorded` : "not recording";
  byId("overview").textContent =
    `${snapshot.faser_version}, up ${Math.round(snapshot.uptime_s)} s, policy ${snapshot.policy}, ${recording}`;
  choose(snapshot.engines);
  const history = histories.get(chosen);
  if (!history) return;
  const engine = history[history.length - 1];
  drawText(snapshot, engine);
  lines("load", history, [(e) => e.running, (e) => e.waiting]);
  lines("goodput", history, [(e) => e.tokens_per_s]);
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
  if (!names.includes(chosen)) chosen = names[0] || "";
  select.value = chosen;
}
byId("engine").addEventListener("change", (event) => { chosen = event.target.value; drawn = null; });

function drawText(snapshot, engine) {
  const steering = engine.steering;
  byId("mode-line").textContent =
    `${steering.mode}${steering.stance === "steer" ? "" : `, ${steering.stance}: ${steering.reason}`}; engine ${engine.presence}`;
  byId("reason").textContent = engine.reason || "no decision yet";
  for (const button of document.querySelectorAll("#modes button")) {
    button.classList.toggle("on", button.dataset.mode === steering.mode);
  }
  const percent = (share) => (share === null ? "-" : `${(share * 100).toFixed(1)} %`);
  const dropped = Object.entries(snapshot.link.dropped).map(([reason, count]) => `${count} ${reason}`).join(", ") || "none";
  const held = Object.entries(steering.counts).map(([reason, count]) => `${count} ${reason}`).join(", ") || "none";
  rows([
    ["lease", engine.lease_age_s === null ? "engine's default" : `held, ${(engine.lease_age_s * 1e3).toFixed(0)} ms old`],
    ["steps under lease", percent(engine.lease_share)],
    ["envelope", steering.envelope_ratio === null ? "not measured yet" : `${steering.envelope_ratio.toFixed(2)} of no speculation`],
    ["records", `${engine.records}, ${engine.lost_records} lost in ${engine.gaps} gaps, ${engine.late_records} late`],
    ["not steered", held],
    ["decisions", `${engine.decisions}, ${engine.decision_us_p50.toFixed(0)} µs p50, ${engine.decision_us_p99.toFixed(0)} µs p99`],
    ["failures", `${engine.failures} deciding, ${engine.sends_dropped} not sent, ${engine.engine_rejected} refused by the engine`],
    ["link", `${snapshot.link.received} in, ${snapshot.link.sent} out, dropped ${dropped}, ${snapshot.link.disconnects} disconnects`],
    ["acceptance", `${percent(engine.acceptance_rate)}, mean length ${engine.mean_draft_length.toFixed(2)} of ${engine.k_max}`],
    ["engine", `${engine.model}, ${engine.method} ${engine.drafter}, vLLM ${engine.vllm_version} on ${engine.device}`],
  ]);
}

function rows(pairs) {
  byId("health").replaceChildren(...pairs.map((pair) => {
    const row = document.createElement("tr");
    row.append(...pair.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    return row;
  }));
}

function surface(id) {
  const canvas = byId(id);
  const scale = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale);
  const height = Math.round(canvas.clientHeight * scale);
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  pen.font = "11px system-ui";
  pen.fillStyle = getComputedStyle(document.body).color;
  return { pen, width: canvas.clientWidth, height: canvas.clientHeight, ink: pen.fillStyle };
}

function lines(id, history, reads) {
  const { pen, width, height, ink } = surface(id);
  const top = Math.max(1, ...history.flatMap((entry) => reads.map((read) => read(entry))));
  reads.forEach((read, index) => {
    pen.strokeStyle = COLOURS[2 - index];
    pen.lineWidth = 1.5;
    pen.beginPath();
    history.forEach((entry, place) => {
      const x = (place + KEPT - history.length) / (KEPT - 1) * width;
      const y = height - 2 - read(entry) / top * (height - 16);
      if (place) pen.lineTo(x, y); else pen.moveTo(x, y);
    });
    pen.stroke();
  });
  const last = history[history.length - 1];
  pen.fillStyle = ink;
  pen.fillText(`${reads.map((read) => read(last).toFixed(0)).join(" / ")}   (top ${top.toFixed(0)})`, 2, 10);
}

const shade = (length, longest) => (length ? `hsl(215 70% ${(88 - 58 * length / longest).toFixed(0)}%)` : "#9aa5b133");

function heat(history, longest) {
  const { pen, width, height } = surface("heat");
  const shown = history.filter((entry) => entry.last_step).slice(-150);
  const handles = [...new Set(shown.flatMap((entry) => entry.last_step.handles))].sort((a, b) => a - b).slice(-128);
  const row = new Map(handles.map((handle, index) => [handle, index]));
  const cell = { width: width / 150, height: height / Math.max(handles.length, 8) };
  shown.forEach((entry, column) => {
    entry.last_step.handles.forEach((handle, index) => {
      if (!row.has(handle)) return;
      pen.fillStyle = shade(entry.last_step.lengths[index], longest);
      pen.fillRect((column + 150 - shown.length) * cell.width, row.get(handle) * cell.height, cell.width + .5, Math.max(cell.height - .5, .5));
    });
  });
  legend("heat-legend", Array.from({ length: longest + 1 }, (_, length) => [shade(length, longest), `${length}`]));
}

function bars(shares) {
  const { pen, width, height, ink } = surface("positions");
  const step = width / Math.max(shares.length, 1);
  shares.forEach((share, index) => {
    const tall = (share || 0) * (height - 28);
    pen.fillStyle = COLOURS[2];
    pen.fillRect(index * step + step * .15, height - 14 - tall, step * .7, tall);
    pen.fillStyle = ink;
    pen.fillText(share === null ? "-" : share.toFixed(2), index * step + step * .2, height - 18 - tall);
    pen.fillText(`${index + 1}`, index * step + step * .45, height - 2);
  });
}

function phases(history) {
  const { pen, width, height, ink } = surface("phases");
  const shown = history.filter((entry) => entry.last_step).slice(-60).map((entry) => entry.last_step);
  const sum = (step) => PHASES.reduce((total, phase) => total + step[phase], 0);
  const top = Math.max(1e-3, ...shown.map(sum));
  shown.forEach((step, place) => {
    let y = height;
    PHASES.forEach((phase, index) => {
      const tall = step[phase] / top * (height - 14);
      y -= tall;
      pen.fillStyle = COLOURS[index];
      pen.fillRect((place + 60 - shown.length) / 60 * width, y, width / 60 - 1, tall);
    });
  });
  pen.fillStyle = ink;
  pen.fillText(`top ${top.toFixed(1)} ms`, 2, 10);
  legend("phase-legend", PHASES.map((phase, index) => [COLOURS[index], phase.replace("_ms", "")]));
}

function legend(id, entries) {
  const place = byId(id);
  if (place.childElementCount === entries.length) return;
  place.replaceChildren(...entries.map(([colour, text]) => {
    const entry = document.createElement("span");
    const key = Object.assign(document.createElement("span"), { className: "key" });
    key.style.background = colour;
    entry.append(key, text);
    return entry;
  }));
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
