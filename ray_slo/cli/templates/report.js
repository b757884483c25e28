"use strict";
// Draws the page's charts from its data, again whenever the filter, the width or the theme changes.
// Columns are described in ray_slo/cli/report_run.py. No library, no network.
(() => {
  const D = JSON.parse(document.getElementById("data").textContent);
  const R = D.requests, B = D.batches, N = R.t.length;
  const PALETTE = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#e15759", "#9c755f"];
  const state = { model: -1, variant: -1, worker: -1, outcome: -1, from: D.from, to: D.to };
  const view = { from: D.from, to: D.to };  // of the worker timeline

  const happened = new Set(R.outcome);

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const hue = (i) => PALETTE[((i % PALETTE.length) + PALETTE.length) % PALETTE.length];
  const fixed = (x, digits = 1) => x === null || !isFinite(x) ? "–" : x.toFixed(digits);
  const clamp = (x, lo, hi) => Math.min(Math.max(x, lo), hi);
  const named = (names, i) => i >= 0 && i < names.length ? names[i] : "–";

  function el(name, attributes = {}, ...children) {
    const svg = ["svg", "g", "path", "line", "rect", "text", "title"].includes(name);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  // -- what is chosen

  const chosen = (i) =>
    (state.model < 0 || R.model[i] === state.model) &&
    (state.variant < 0 || R.variant[i] === state.variant) &&
    (state.worker < 0 || R.worker[i] === state.worker) &&
    (state.outcome < 0 || (state.outcome === D.outcomes.length ? D.outcomes[R.outcome[i]].bad : R.outcome[i] === state.outcome)) &&
    R.t[i] >= state.from && R.t[i] <= state.to;
  const batchChosen = (j) =>
    (state.model < 0 || B.model[j] === state.model) &&
    (state.variant < 0 || B.variant[j] === state.variant) &&
    (state.worker < 0 || B.worker[j] === state.worker);
  const batchInside = (j) => batchChosen(j) && B.start[j] !== null && B.start[j] >= state.from && B.start[j] <= state.to;
  let requests = [], batches = [], P = [];  // P: plans
  function choose() {
    P = [...(D.plans ? D.plans.t.keys() : [])].filter((n) => D.plans.t[n] >= state.from && D.plans.t[n] <= state.to);
    requests = [];
    for (let i = 0; i < N; i++) if (chosen(i)) requests.push(i);
    batches = [];
    if (B) for (let j = 0; j < B.size.length; j++) if (batchInside(j)) batches.push(j);
  }

  // -- frames and axes

  function ticks(lo, hi, count) {
    const raw = (hi - lo) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(raw || 1));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || 1;
    const found = [];
    for (let k = Math.ceil(lo / step); k * step <= hi + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
    return found;
  }

  function frame(plot, x, y, xLabel, yLabel) {
    const width = plot.clientWidth || 320, height = 220, left = 46, bottom = 34, top = 20, right = 8;
    const span = (x[1] - x[0]) || 1, rise = (y[1] - y[0]) || 1;
    const X = (v) => left + (v - x[0]) / span * (width - left - right);
    const Y = (v) => height - bottom - (v - y[0]) / rise * (height - bottom - top);
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    for (const v of ticks(x[0], x[1], width / 90)) {
      svg.append(el("text", { x: X(v), y: height - bottom + 14, "text-anchor": "middle" }, String(v)));
      svg.append(el("line", { class: "axis", x1: X(v), x2: X(v), y1: height - bottom, y2: height - bottom + 4 }));
    }
    for (const v of ticks(y[0], y[1], 4)) {
      svg.append(el("text", { x: left - 6, y: Y(v) + 4, "text-anchor": "end" }, String(v)));
      svg.append(el("line", { class: "axis", x1: left, x2: width - right, y1: Y(v), y2: Y(v) }));
    }
    svg.append(el("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, xLabel));
    svg.append(el("text", { x: 2, y: 9 }, yLabel));
    plot.append(svg);
    return { svg, X, Y, width, height, left, right, top, bottom, back: (px) => x[0] + (px - left) / (width - left - right) * span };
  }

  function empty(plot, words) {
    plot.append(el("p", {}, words));
  }

  function legend(plot, entries) {
    const box = el("div", { class: "legend" });
    for (const [name, colour] of entries) {
      const dot = el("i");
      dot.style.background = colour;
      box.append(el("span", {}, dot, name));
    }
    plot.append(box);
  }

  function readout(plot, target, words) {
    const line = el("div", { class: "readout" });
    plot.append(line);
    const show = (event) => {
      const box = target.getBoundingClientRect();
      line.textContent = words(event.clientX - box.left, event.clientY - box.top) || "";
    };
    target.addEventListener("pointermove", show);
    target.addEventListener("pointerdown", show);
    return line;
  }

  // Stacked bars: heights[k][bin] of series k, at edges.
  function stacked(f, edges, heights, colours) {
    const base = new Float64Array(edges.length - 1);
    heights.forEach((row, k) => {
      let path = "";
      row.forEach((h, b) => {
        if (!h) return;
        const x0 = f.X(edges[b]), x1 = Math.max(f.X(edges[b + 1]) - 0.5, x0 + 0.5);
        path += `M${x0.toFixed(1)},${f.Y(base[b]).toFixed(1)}V${f.Y(base[b] + h).toFixed(1)}H${x1.toFixed(1)}V${f.Y(base[b]).toFixed(1)}Z`;
        base[b] += h;
      });
      if (path) f.svg.append(el("path", { d: path, fill: colours[k] }));
    });
  }

  function timeBins(plot) {
    const count = clamp(Math.floor((plot.clientWidth || 320) / 8), 20, 120);
    const width = Math.max(state.to - state.from, 1e-9) / count;
    const edges = Array.from({ length: count + 1 }, (_, b) => state.from + b * width);
    return { count, width, edges, of: (t) => clamp(Math.floor((t - state.from) / width), 0, count - 1) };
  }

  const zeros = (rows, columns) => Array.from({ length: rows }, () => new Array(columns).fill(0));

  // -- charts

  function goodput(plot) {
    const bins = timeBins(plot), rates = zeros(D.outcomes.length, bins.count);
    for (const i of requests) rates[R.outcome[i]][bins.of(R.t[i])] += 1 / bins.width;
    const total = bins.edges.slice(1).map((_, b) => rates.reduce((sum, row) => sum + row[b], 0));
    const f = frame(plot, [state.from, state.to], [0, Math.max(...total, 1e-9) * 1.05], "time of arrival (s)", "requests per second");
    const order = D.outcomes.map((_, k) => k).sort((a, b) => D.outcomes[a].bad - D.outcomes[b].bad);
    stacked(f, bins.edges, order.map((k) => rates[k]), order.map((k) => css(D.outcomes[k].colour)));
    legend(plot, order.filter((k) => happened.has(k)).map((k) => [D.outcomes[k].name, css(D.outcomes[k].colour)]));
    for (const n of P) {
      const x = f.X(D.plans.t[n]), failed = D.plans.failed[n] ? " failed" : "";
      f.svg.append(el("line", { class: `plan${failed}`, x1: x, x2: x, y1: f.top - 6, y2: f.height - f.bottom }));
    }
    if (P.length) legend(plot, [["dashed: the plan changed" + (P.some((n) => D.plans.failed[n]) ? "; red: planning failed" : ""), "transparent"]]);
    readout(plot, f.svg, (px) => {
      const near = P.map((n) => [Math.abs(f.X(D.plans.t[n]) - px), n]).sort((a, b) => a[0] - b[0])[0];
      if (near && near[0] < 5) return `${fixed(D.plans.t[near[1]], 2)} s: ${D.plans.words[near[1]]}`;
      const b = bins.of(f.back(px));
      const parts = order.filter((k) => rates[k][b]).map((k) => `${D.outcomes[k].name} ${fixed(rates[k][b])}/s`);
      return `${fixed(bins.edges[b], 2)}–${fixed(bins.edges[b + 1], 2)} s: ${parts.join(", ") || "nothing"}`;
    });
    brush(f, (from, to) => { state.from = view.from = from; state.to = view.to = to; draw(); });
  }

  // Drag sideways to choose a time.
  function brush(f, apply) {
    let begin = null, box = null;
    const at = (event) => {
      const rect = f.svg.getBoundingClientRect();
      return clamp((event.clientX - rect.left) * f.width / rect.width, f.left, f.width - f.right);
    };
    f.svg.addEventListener("pointerdown", (event) => {
      begin = at(event);
      box = el("rect", { class: "brush", x: begin, y: f.top, width: 0, height: f.height - f.top - f.bottom });
      f.svg.append(box);
      f.svg.setPointerCapture(event.pointerId);
    });
    f.svg.addEventListener("pointermove", (event) => {
      if (!box) return;
      box.setAttribute("x", Math.min(begin, at(event)));
      box.setAttribute("width", Math.abs(at(event) - begin));
    });
    const end = (event) => {
      if (!box) return;
      const [a, b] = [begin, at(event)].sort((p, q) => p - q);
      box.remove();
      box = null;
      if (event.type === "pointerup" && b - a > 8) apply(f.back(a), f.back(b));
    };
    f.svg.addEventListener("pointerup", end);
    f.svg.addEventListener("pointercancel", end);
  }

  function latency(plot) {
    const groups = new Map();
    for (const i of requests) {
      const key = D.models.length <= 8 ? R.model[i] : -1;
      if (!groups.has(key)) groups.set(key, { all: 0, times: [] });
      const group = groups.get(key);
      group.all += 1;
      if (R.latency[i] !== null) group.times.push(R.latency[i]);
    }
    const keys = [...groups.keys()].sort((a, b) => a - b);
    for (const group of groups.values()) group.times.sort((a, b) => a - b);
    const slos = D.slo_ms.filter((_, m) => state.model < 0 || state.model === m);
    const tail = Math.max(...keys.map((k) => groups.get(k).times.at(Math.floor(0.995 * groups.get(k).times.length)) || 0), 0);
    const f = frame(plot, [0, Math.max(1.25 * Math.max(...slos), Math.min(tail, 4 * Math.max(...slos)))], [0, 100], "latency (ms); dashed: SLO", "answered (% of all)");
    const stop = f.back(f.width - f.right);
    for (const key of keys) {
      const { all, times } = groups.get(key);
      const step = Math.max(1, Math.floor(times.length / 600));
      let path = `M${f.X(0)},${f.Y(0)}`, last = 0;
      times.forEach((t, n) => {
        if (t > stop || (n % step && n !== times.length - 1)) return;
        path += `H${f.X(t).toFixed(1)}V${f.Y(100 * (n + 1) / all).toFixed(1)}`;
        last = t;
      });
      if (last < stop) path += `H${f.X(stop)}`;
      f.svg.append(el("path", { d: path, fill: "none", stroke: hue(Math.max(key, 0)), "stroke-width": 2 }));
    }
    for (const slo of new Set(slos)) f.svg.append(el("line", { class: "mark", x1: f.X(slo), x2: f.X(slo), y1: f.top, y2: f.height - f.bottom }));
    legend(plot, keys.map((k) => [k < 0 ? "all models" : D.models[k], hue(Math.max(k, 0))]));
    readout(plot, f.svg, (px) => {
      const ms = Math.max(f.back(px), 0);
      return `within ${fixed(ms)} ms: ` + keys.map((k) => {
        const { all, times } = groups.get(k);
        let lo = 0, hi = times.length;
        while (lo < hi) { const mid = (lo + hi) >> 1; if (times[mid] <= ms) lo = mid + 1; else hi = mid; }
        return `${k < 0 ? "all" : D.models[k]} ${fixed(100 * lo / all)} %`;
      }).join(", ");
    });
  }

  function sizes(plot) {
    const rows = zeros(Math.max(D.variants.length, 1), 1);
    const add = (variant, size, count) => {
      const row = rows[Math.max(variant, 0)];
      while (row.length <= size) row.push(0);
      row[size] += count;
    };
    if (B) for (const j of batches) add(B.variant[j], B.size[j], 1);
    else for (const i of requests) if (R.batch_size.length && R.batch_size[i]) add(R.variant[i], R.batch_size[i], 1 / R.batch_size[i]);
    const most = Math.max(...rows.map((row) => row.length - 1));
    if (most < 1) return empty(plot, "No batch here.");
    const width = Math.max(1, Math.ceil(most / 64));
    const edges = [];
    for (let s = 0.5; s <= most + 0.5 + width; s += width) edges.push(s);
    const heights = rows.map((row) => edges.slice(1).map((_, b) => row.slice(1 + b * width, 1 + (b + 1) * width).reduce((a, c) => a + c, 0)));
    const top = Math.max(...edges.slice(1).map((_, b) => heights.reduce((sum, row) => sum + row[b], 0)));
    const f = frame(plot, [0.5, edges.at(-1)], [0, top * 1.05], "batch size", "batches");
    stacked(f, edges, heights, rows.map((_, k) => hue(k)));
    if (D.variants.length > 1) legend(plot, D.variants.map((name, k) => [name, hue(k)]));
    readout(plot, f.svg, (px) => {
      const b = clamp(Math.floor((f.back(px) - 0.5) / width), 0, edges.length - 2);
      return `${width > 1 ? `${1 + b * width}–${(b + 1) * width}` : 1 + b}: ${fixed(heights.reduce((sum, row) => sum + row[b], 0), 0)} batches`;
    });
  }

  function mix(plot) {
    const bins = timeBins(plot), counts = zeros(D.variants.length, bins.count);
    const sum = new Array(bins.count).fill(0), known = new Array(bins.count).fill(0);
    for (const i of requests) {
      const v = R.variant[i];
      if (v < 0) continue;
      const b = bins.of(R.t[i]);
      counts[v][b] += 1;
      if (D.accuracy[v] !== null && !D.outcomes[R.outcome[i]].bad) { sum[b] += D.accuracy[v]; known[b] += 1; }
    }
    const all = bins.edges.slice(1).map((_, b) => counts.reduce((n, row) => n + row[b], 0));
    if (!all.some((n) => n)) return empty(plot, "Nothing was answered here.");
    const share = counts.map((row) => row.map((n, b) => all[b] ? 100 * n / all[b] : 0));
    const f = frame(plot, [state.from, state.to], [0, 100], "time of arrival (s)", "share of answers (%)");
    stacked(f, bins.edges, share, share.map((_, k) => hue(k)));
    legend(plot, D.variants.map((name, k) => [D.accuracy[k] === null ? name : `${name} (${fixed(D.accuracy[k])} %)`, hue(k)]));
    const mean = sum.map((s, b) => known[b] ? s / known[b] : null), has = mean.filter((m) => m !== null);
    if (has.length) {
      const lo = Math.min(...has), hi = Math.max(...has), pad = Math.max((hi - lo) * 0.1, 0.5);
      const g = frame(plot, [state.from, state.to], [lo - pad, hi + pad], "time of arrival (s)", "accuracy of answers in time (%)");
      let path = "";
      mean.forEach((m, b) => { if (m !== null) path += `${path ? "L" : "M"}${g.X((bins.edges[b] + bins.edges[b + 1]) / 2).toFixed(1)},${g.Y(m).toFixed(1)}`; });
      g.svg.append(el("path", { d: path, fill: "none", stroke: css("ink"), "stroke-width": 2 }));
    }
    readout(plot, f.svg, (px) => {
      const b = bins.of(f.back(px));
      const parts = D.variants.map((name, k) => counts[k][b] ? `${name} ${fixed(share[k][b], 0)} %` : "").filter(Boolean);
      return `${fixed(bins.edges[b], 2)} s: ${parts.join(", ") || "nothing"}${mean[b] === null ? "" : `; accuracy ${fixed(mean[b], 2)} %`}`;
    });
  }

  function errors(plot) {
    const off = batches.filter((j) => B.status[j] === "finished" && B.predicted[j] !== null).map((j) => 1e3 * (B.finish[j] - B.predicted[j])).sort((a, b) => a - b);
    if (!off.length) return empty(plot, "No batch ended here.");
    const at = (q) => off[Math.min(Math.floor(q * off.length), off.length - 1)];
    const lo = Math.min(at(0.005), 0), hi = Math.max(at(0.995), 0), pad = Math.max((hi - lo) * 0.05, 0.01);
    const count = 50, width = (hi - lo + 2 * pad) / count, heights = new Array(count).fill(0);
    for (const e of off) heights[clamp(Math.floor((e - lo + pad) / width), 0, count - 1)] += 1;
    const edges = Array.from({ length: count + 1 }, (_, b) => lo - pad + b * width);
    const f = frame(plot, [edges[0], edges[count]], [0, Math.max(...heights) * 1.05], "ended after its prediction (ms)", "batches");
    stacked(f, edges, [heights], [hue(0)]);
    f.svg.append(el("line", { class: "mark", x1: f.X(0), x2: f.X(0), y1: f.top, y2: f.height - f.bottom }));
    plot.append(el("div", { class: "readout" }, `median ${fixed(at(0.5), 2)} ms, 95 % within ${fixed(at(0.95), 2)} ms, earliest ${fixed(off[0])} ms, latest ${fixed(off.at(-1))} ms`));
  }

  // -- the worker timeline

  function timeline(plot) {
    const row = 26, left = Math.min(96, (plot.clientWidth || 320) * 0.25), axis = 22, height = D.workers.length * row + axis;
    const width = plot.clientWidth || 320, scale = window.devicePixelRatio || 1;
    const canvas = el("canvas", { width: Math.round(width * scale), height: Math.round(height * scale), role: "img", "aria-label": "What every worker ran" });
    canvas.style.height = `${height}px`;
    const tools = el("div", { class: "tools" });
    const zoom = (factor, centre = (view.from + view.to) / 2) => {
      const span = clamp((view.to - view.from) * factor, 1e-3, D.to - Math.min(D.from, 0) + 1e-3);
      const share = (centre - view.from) / Math.max(view.to - view.from, 1e-12);
      view.from = centre - share * span;
      view.to = view.from + span;
      paint();
    };
    const whole = () => { view.from = state.from; view.to = state.to; paint(); };
    for (const [text, words, act] of [["+", "Zoom in", () => zoom(0.5)], ["−", "Zoom out", () => zoom(2)], ["◀", "Earlier", () => pan(-0.5)], ["▶", "Later", () => pan(0.5)], ["all", "Whole time", whole]]) {
      const button = el("button", { type: "button", "aria-label": words, title: words }, text);
      button.addEventListener("click", act);
      tools.append(button);
    }
    plot.append(tools, canvas);
    const pan = (share) => { const d = share * (view.to - view.from); view.from += d; view.to += d; paint(); };
    const X = (t) => left + (t - view.from) / Math.max(view.to - view.from, 1e-12) * (width - left);
    const T = (px) => view.from + (px - left) / (width - left) * (view.to - view.from);
    const pen = canvas.getContext("2d");

    function paint() {
      pen.setTransform(scale, 0, 0, scale, 0, 0);
      pen.clearRect(0, 0, width, height);
      pen.font = "11px system-ui, sans-serif";
      pen.textBaseline = "middle";
      const ink = css("ink"), soft = css("soft"), line = css("line"), late = css("late"), lost = css("dropped");
      D.workers.forEach((_, w) => { pen.fillStyle = line; pen.fillRect(left, (w + 1) * row - 1, width - left, 1); });
      pen.save();
      pen.beginPath();
      pen.rect(left, 0, width - left, height);
      pen.clip();
      let shown = 0;
      for (let j = 0; j < B.size.length; j++) {
        if (B.start[j] === null || B.finish[j] < view.from || B.start[j] > view.to) continue;
        shown += 1;
        const x = X(B.start[j]), w = Math.max(X(B.finish[j]) - x, 0.7), y = B.worker[j] * row + 3;
        pen.globalAlpha = batchChosen(j) ? 0.9 : 0.12;
        pen.fillStyle = B.status[j] === "finished" ? hue(B.variant[j]) : lost;
        pen.fillRect(x, y, w > 3 ? w - 0.6 : w, row - 7);
        if (B.slack[j] !== null && B.slack[j] < 0) { pen.fillStyle = late; pen.fillRect(x, y + row - 10, w, 3); }
        if (w > 16) { pen.fillStyle = "#fff"; pen.textAlign = "center"; pen.fillText(String(B.size[j]), x + w / 2, y + (row - 7) / 2); }
      }
      pen.globalAlpha = 1;
      pen.setLineDash([2, 3]);
      for (let n = 0; D.plans && n < D.plans.t.length; n++) {
        pen.strokeStyle = D.plans.failed[n] ? lost : ink;
        pen.beginPath();
        pen.moveTo(X(D.plans.t[n]), 0);
        pen.lineTo(X(D.plans.t[n]), height - axis);
        pen.stroke();
      }
      pen.setLineDash([]);
      pen.fillStyle = soft;
      pen.textAlign = "center";
      for (const t of ticks(view.from, view.to, (width - left) / 80)) pen.fillText(String(t), clamp(X(t), left + 8, width - 12), height - axis / 2);
      pen.restore();
      pen.textAlign = "left";
      pen.fillStyle = ink;
      const letters = Math.floor(left / 6.5);
      D.workers.forEach((name, w) => pen.fillText(name.length > letters ? name.slice(0, letters - 1) + "…" : name, 0, w * row + row / 2));
      canvas.dataset.shown = shown;
      canvas.dataset.from = view.from;
      canvas.dataset.to = view.to;
    }

    const words = (px, py) => {
      const w = Math.floor(py / row), t = T(px);
      if (px < left) return named(D.workers, w);
      for (let j = 0; j < B.size.length; j++) {
        if (B.worker[j] !== w || !(B.start[j] <= t && t <= Math.max(B.finish[j], B.start[j] + 2 * (view.to - view.from) / width))) continue;
        const off = B.predicted[j] === null ? "" : `, ended ${fixed(1e3 * (B.finish[j] - B.predicted[j]))} ms after its prediction`;
        const slack = B.slack[j] === null ? "" : `, slack ${fixed(B.slack[j])} ms`;
        return `${D.workers[w]}: ${B.size[j]} of ${named(D.variants, B.variant[j])} (${B.status[j]}), ${fixed(B.start[j], 3)}–${fixed(B.finish[j], 3)} s${off}${slack}`;
      }
      return `${named(D.workers, w)}: idle at ${fixed(t, 3)} s`;
    };
    const line = readout(plot, canvas, words);
    line.textContent = "";
    // One finger or the mouse drags; two fingers, or ctrl and the wheel, zoom.
    const fingers = new Map();
    let gap = 0;
    canvas.style.touchAction = "pan-y";
    canvas.addEventListener("pointerdown", (event) => { fingers.set(event.pointerId, event.clientX); canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return;
      const before = fingers.get(event.pointerId);
      fingers.set(event.pointerId, event.clientX);
      if (fingers.size === 1) { const d = (before - event.clientX) / (width - left) * (view.to - view.from); view.from += d; view.to += d; paint(); }
      if (fingers.size === 2) {
        const [a, b] = [...fingers.values()], now = Math.max(Math.abs(a - b), 8);
        if (gap) zoom(gap / now, T((a + b) / 2 - canvas.getBoundingClientRect().left));
        gap = now;
      }
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => { fingers.delete(event.pointerId); gap = 0; });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, T(event.clientX - canvas.getBoundingClientRect().left));
    }, { passive: false });
    if (D.variants.length > 1) legend(plot, [...D.variants.map((name, k) => [name, hue(k)])]);
    paint();
  }

  // -- the filter, and everything together

  const CHARTS = { goodput, latency, sizes, mix, errors, timeline };
  const form = document.getElementById("filter");
  const shown = el("output", { "aria-live": "polite" });

  function select(key, words, names, offered = () => true) {
    if (names.length < 2) return;
    const box = el("select", { name: key, "aria-label": words });
    box.append(el("option", { value: -1 }, words));
    names.forEach((name, i) => { if (offered(i)) box.append(el("option", { value: i }, name)); });
    box.addEventListener("change", () => { state[key] = +box.value; draw(); });
    form.append(box);
  }

  function draw() {
    choose();
    const good = requests.filter((i) => !D.outcomes[R.outcome[i]].bad).length;
    const whole = state.from === D.from && state.to === D.to;
    shown.value = `${requests.length.toLocaleString("en")} of ${N.toLocaleString("en")} requests` +
      (requests.length ? `, ${fixed(100 * good / requests.length)} % in time` : "") +
      (whole ? "" : `, ${fixed(state.from, 2)}–${fixed(state.to, 2)} s`);
    for (const figure of document.querySelectorAll("[data-chart]")) {
      const plot = figure.querySelector(".plot");
      plot.replaceChildren();
      CHARTS[figure.dataset.chart](plot);
    }
    for (const item of document.querySelectorAll("details[data-outcome]")) {
      const model = state.model < 0 || item.dataset.model === D.models[state.model];
      const kind = D.outcomes.findIndex((o) => o.name === item.dataset.outcome);
      const outcome = state.outcome < 0 || kind === state.outcome || (state.outcome === D.outcomes.length && D.outcomes[kind].bad);
      item.hidden = !(model && outcome);
    }
    for (const box of searches) find(box);
  }

  // -- tables that can be searched

  const searches = document.querySelectorAll(".search");
  function find(box) {
    const words = box.querySelector("input").value.toLowerCase(), kind = box.querySelector("select").value;
    const whole = state.from === D.from && state.to === D.to;
    let left = 0, all = 0;
    for (const row of box.nextElementSibling.querySelectorAll("tbody tr")) {
      const at = row.dataset.at;
      const inside = whole || (at !== undefined && +at >= state.from && +at <= state.to);
      row.hidden = !(inside && (!kind || row.dataset.kind === kind) && row.textContent.toLowerCase().includes(words));
      all += 1;
      left += !row.hidden;
    }
    box.querySelector("output").value = `${left} of ${all}`;
  }
  for (const box of searches) {
    box.addEventListener("submit", (event) => event.preventDefault());
    for (const name of ["input", "change"]) box.addEventListener(name, () => find(box));
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  select("model", "every model", D.models);
  select("variant", "every variant", D.variants);
  select("worker", "every worker", D.workers);
  select("outcome", "every outcome", [...D.outcomes.map((o) => o.name), "all violations"], (i) => i === D.outcomes.length || happened.has(i));
  const reset = el("button", { type: "button" }, "show all");
  reset.addEventListener("click", () => {
    Object.assign(state, { model: -1, variant: -1, worker: -1, outcome: -1, from: D.from, to: D.to });
    Object.assign(view, { from: D.from, to: D.to });
    for (const box of form.querySelectorAll("select")) box.value = -1;
    for (const box of searches) box.reset();
    draw();
  });
  form.append(reset, shown);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let width = document.body.clientWidth;
  addEventListener("resize", () => { if (document.body.clientWidth !== width) { width = document.body.clientWidth; draw(); } });
  draw();
})();
