"use strict";
(() => {
  const root = document.documentElement;
  const $ = (selector, from = document) => from.querySelector(selector);
  const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];

  // The theme is set before anything is painted; a browser may refuse to remember it for a file.
  const remembered = (value) => {
    try { return value ? localStorage.setItem("mesascope-theme", value) : localStorage.getItem("mesascope-theme"); } catch { return null; }
  };
  const chosen = remembered();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;

  function themeButton() {
    const button = $("#theme"), system = matchMedia("(prefers-color-scheme: dark)");
    const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
    const say = () => button.setAttribute("aria-pressed", dark());
    button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; remembered(root.dataset.theme); say(); });
    system.addEventListener("change", say);
    say();
  }

  // Numbers for people: four digits that count.
  const superscript = (n) => [...String(n)].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("");
  function text(value, digits = 4, strip = true) {
    if (value === null || value === undefined || !isFinite(value)) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    let out;
    if (size < 1e-3 || size >= 1e6) {
      const [mantissa, exponent] = value.toExponential(Math.min(2, digits - 1)).split("e");
      out = `${mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa}×10${superscript(Number(exponent))}`;
    } else {
      const long = value.toPrecision(size >= 1e4 ? 6 : digits);
      out = strip || size >= 10 ** digits ? String(Number(long)) : long;
    }
    return out.replace("-", "−");
  }

  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  // Printing changes the width without a chance to draw again: then all of it is scaled.
  const sheet = (width, height, ...children) => make("svg", { "aria-hidden": "true", viewBox: `0 0 ${width} ${height}` }, ...children);
  const html = (tag, className, ...children) => {
    const node = document.createElement(tag);
    node.className = className;
    node.append(...children);
    return node;
  };
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

  // Axes.
  function linearTicks(low, high, count, whole = false) {
    const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
    let step = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.999) * power;
    if (whole) step = Math.max(1, Math.round(step));
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push([i * step, text(Number((i * step).toPrecision(12)), 6)]);
    return ticks;
  }
  function logTicks(low, high) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), ticks = [];
    const wide = to - from > 3, every = Math.max(1, Math.round((to - from) / 6));
    for (let e = from; e <= to; e++) {
      for (const m of wide ? [1] : [1, 2, 5]) {
        const value = m * 10 ** e;
        if (value >= low * 0.999 && value <= high * 1.001 && (!wide || (e - from) % every === 0)) ticks.push([value, wide && Math.abs(e) > 2 ? `10${superscript(e)}` : text(value)]);
      }
    }
    return ticks;
  }
  function axis(low, high, log, from, to) {
    const f = log ? Math.log : (v) => v, a = f(low), b = f(high);
    return { low, high, log, at: (v) => from + ((f(v) - a) / (b - a || 1)) * (to - from) };
  }

  // Curves. A line's y is by seed and x; null is not a number and interrupts it.
  function statistics(line) {
    const n = line.y[0].length, mean = [], low = [], high = [];
    for (let i = 0; i < n; i++) {
      const values = line.y.map((seed) => seed[i]).filter((v) => v !== null);
      // As everywhere: a mean over seeds of which one is not a number is none.
      const whole = values.length === line.y.length && values.length > 0;
      mean.push(whole ? values.reduce((a, b) => a + b) / values.length : null);
      low.push(whole ? Math.min(...values) : null);
      high.push(whole ? Math.max(...values) : null);
    }
    return { mean, low, high };
  }

  class Curves {
    constructor(figure, data, settings) {
      Object.assign(this, { figure, data, settings, plot: $(".plot", figure), live: $("output", figure), off: new Set(), here: null });
      this.rows = $$(".key tbody tr", figure);
      this.lines = data.lines.map((line, i) => ({ ...line, ...statistics(line), xs: data.xs[line.x], row: this.rows[i] }));
      this.rows.forEach((row, i) => {
        const button = $("button", row);
        button.addEventListener("click", () => {
          this.off.has(i) ? this.off.delete(i) : this.off.add(i);
          button.setAttribute("aria-pressed", !this.off.has(i));
          this.draw();
        });
        row.addEventListener("pointerenter", () => this.emphasize(i));
        row.addEventListener("pointerleave", () => this.emphasize(null));
      });
      const hover = (event) => this.point(event);
      this.plot.addEventListener("pointermove", hover);
      this.plot.addEventListener("pointerdown", hover);
      this.plot.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") this.leave(); });
      this.plot.addEventListener("blur", () => this.leave());
      this.plot.addEventListener("keydown", (event) => this.key(event));
    }

    get shown() {
      const { variant } = this.settings;
      return this.lines.filter((line, i) => !this.off.has(i) && (!line.variant || variant === "both" || line.variant === variant));
    }

    draw() {
      const { plot, data, settings } = this, width = plot.clientWidth, height = plot.clientHeight;
      if (!width) return;
      for (const line of this.lines) line.row.hidden = Boolean(line.variant) && settings.variant !== "both" && line.variant !== settings.variant;
      const usable = (line, values) => values.filter((v, i) => v !== null && (!data.log_y || v > 0) && (!data.log_x || line.xs[i] > 0));
      let xs = [], ys = [];
      for (const line of this.shown) {
        xs.push(...line.xs.filter((x) => !data.log_x || x > 0));
        ys.push(...usable(line, line.low), ...usable(line, line.high));
      }
      const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity), most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
      if (!ys.length) { xs = data.log_x ? [1, 10] : [0, 1]; ys = data.log_y ? [1, 10] : [0, 1]; }
      let [x0, x1, y0, y1] = [least(xs), most(xs), least(ys), most(ys)];
      if (data.ticks && !data.log_x) { x0 = Math.min(x0, ...data.ticks.map((t) => t[0])); x1 = Math.max(x1, ...data.ticks.map((t) => t[0])); }
      if (x0 === x1) { x0 = data.log_x ? x0 / 2 : x0 - 1; x1 = data.log_x ? x1 * 2 : x1 + 1; }
      if (data.log_y) { const room = (y1 / y0) ** 0.05 || 1.1; y0 /= Math.max(room, 1.02); y1 *= Math.max(room, 1.02); }
      else if (data.y_max !== null) { y0 = 0; y1 = data.y_max; }
      else { const room = 0.05 * (y1 - Math.min(0, y0)) || 1; y1 += room; y0 = y0 < 0 ? y0 - room : 0; }

      const vertical = data.log_y ? logTicks(y0, y1) : linearTicks(y0, y1, height / 55);
      const left = 12 + 6.3 * vertical.reduce((a, [, label]) => Math.max(a, label.length), 1), top = 24, right = 10, bottom = 36;
      const x = axis(x0, x1, data.log_x, left + 4, width - right), y = axis(y0, y1, data.log_y, height - bottom, top);
      Object.assign(this, { x, y, left, box: { left, right: width - right, top, bottom: height - bottom } });
      const name = `clip-${this.figure.id}`;
      const svg = sheet(width, height, make("clipPath", { id: name }, make("rect", { x: left, y: top - 4, width: width - right - left + 4, height: height - bottom - top + 6 })));
      for (const [value, label] of vertical) {
        const at = y.at(value);
        svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }), make("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, label));
      }
      let last = -Infinity;
      for (const [value, label] of data.ticks ?? (data.log_x ? logTicks(x0, x1) : linearTicks(x0, x1, width / 75))) {
        const at = x.at(value), half = 3.2 * label.length;
        if (at < left - 1 || at > width - right + 1) continue;
        svg.append(make("line", { class: "frame", x1: at, x2: at, y1: height - bottom, y2: height - bottom + 4 }));
        if (at - half < last + 4) continue;
        last = at + half;
        svg.append(make("text", { x: Math.min(at, width - half), y: height - bottom + 16, "text-anchor": "middle" }, label));
      }
      svg.append(
        make("line", { class: "frame", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
        make("text", { x: 0, y: 10 }, data.ylabel),
        make("text", { x: width - right, y: height - 3, "text-anchor": "end" }, data.xlabel),
      );
      const layer = make("g", { "clip-path": `url(#${name})` });
      for (const line of this.shown) layer.append(this.drawn(line));
      this.over = make("g");
      svg.append(layer, this.over);
      this.tip = html("div", "tip");
      this.tip.hidden = true;
      plot.replaceChildren(svg, this.tip);
      this.grid = [...new Set(this.shown.flatMap((line) => line.xs))].filter((v) => !data.log_x || v > 0).sort((a, b) => a - b);
      this.leave();
    }

    path(line, values) {
      let out = "", pen = false;
      values.forEach((v, i) => {
        const there = v !== null && (!this.data.log_y || v > 0) && (!this.data.log_x || line.xs[i] > 0);
        if (there) out += `${pen ? "L" : "M"}${this.x.at(line.xs[i]).toFixed(1)} ${clamp(this.y.at(v), -2e3, 4e3).toFixed(1)}`;
        pen = there;
      });
      return out;
    }

    drawn(line) {
      const group = make("g", { class: "curve", style: `--c:${line.color}` });
      line.node = group;
      const style = `line${line.dashed ? " dashed" : line.variant === "as_written" ? " as_written" : ""}`;
      if (this.settings.seeds === "each" && line.y.length > 1) {
        for (const seed of line.y) group.append(make("path", { class: `${style} thin`, d: this.path(line, seed) }));
        return group;
      }
      if (line.y.length > 1) {
        // A band for each stretch without a gap.
        const runs = [[]];
        line.xs.forEach((x, i) => {
          if (line.mean[i] !== null && (!this.data.log_y || line.low[i] > 0) && (!this.data.log_x || x > 0)) runs.at(-1).push(i); else runs.push([]);
        });
        const edge = (values, order) => order.map((i) => `${this.x.at(line.xs[i]).toFixed(1)} ${clamp(this.y.at(values[i]), -2e3, 4e3).toFixed(1)}`);
        for (const points of runs) if (points.length) group.append(make("path", { class: "band", d: `M${[...edge(line.high, points), ...edge(line.low, [...points].reverse())].join("L")}Z` }));
      }
      group.append(make("path", { class: style, d: this.path(line, line.mean) }));
      if (line.markers) line.xs.forEach((v, i) => { if (line.mean[i] !== null && (!this.data.log_y || line.mean[i] > 0) && (!this.data.log_x || v > 0)) group.append(make("circle", { class: "point", cx: this.x.at(v), cy: this.y.at(line.mean[i]), r: 2.4 })); });
      return group;
    }

    emphasize(i) {
      for (const line of this.lines) line.node?.classList.toggle("dim", i !== null && line !== this.lines[i] && !this.off.has(i));
    }

    // The point of a line next to x, if it has one close by.
    index(line, x) {
      let best = -1, distance = Infinity;
      line.xs.forEach((v, i) => {
        if (this.data.log_x && v <= 0) return;
        const d = Math.abs(this.x.at(v) - this.x.at(x));
        if (d < distance) [best, distance] = [i, d];
      });
      return distance <= Math.max(1, 0.02 * (this.box.right - this.box.left)) ? best : -1;
    }

    point(event) {
      if (!this.grid?.length) return;
      const area = this.plot.getBoundingClientRect(), px = event.clientX - area.left, py = event.clientY - area.top;
      const x = this.grid.reduce((a, b) => (Math.abs(this.x.at(b) - px) < Math.abs(this.x.at(a) - px) ? b : a));
      let near = null, distance = Infinity;
      for (const line of this.shown) {
        const i = this.index(line, x);
        const d = i < 0 || line.mean[i] === null ? Infinity : Math.abs(this.y.at(line.mean[i]) - py);
        if (d < distance) [near, distance] = [line, d];
      }
      this.show(x, near);
    }

    key(event) {
      const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }, turns = { ArrowUp: -1, ArrowDown: 1 };
      if (event.key === "Escape") return this.leave();
      if (!(event.key in moves || event.key in turns) || !this.grid?.length || !this.shown.length) return;
      event.preventDefault();
      const shown = this.shown, near = Math.max(0, shown.indexOf(this.here?.near));
      const at = this.here ? this.grid.indexOf(this.here.x) : event.key === "ArrowRight" ? -1 : this.grid.length;
      const x = this.grid[clamp(at + (moves[event.key] ?? 0), 0, this.grid.length - 1)];
      this.show(x, shown[(near + (turns[event.key] ?? 0) + shown.length) % shown.length]);
    }

    show(x, near) {
      this.here = { x, near };
      this.over.replaceChildren(make("line", { class: "guide", x1: this.x.at(x), x2: this.x.at(x), y1: this.box.top, y2: this.box.bottom }));
      this.values((line) => this.index(line, x), `${this.data.xlabel} ${this.tick(x)}`, near);
      for (const line of this.shown) {
        const i = this.index(line, x), mean = i < 0 ? null : line.mean[i];
        if (mean === null || (this.data.log_y && mean <= 0)) continue;
        const at = this.y.at(mean);
        if (at >= this.box.top - 2) this.over.append(make("circle", { class: "spot", style: `--c:${line.color}`, cx: this.x.at(line.xs[i]), cy: at, r: line === near ? 4.2 : 2.6 }));
      }
      const i = near ? this.index(near, x) : -1;
      this.tip.hidden = i < 0 || near.mean[i] === null;
      if (this.tip.hidden) return;
      const range = near.y.length > 1 ? `${text(near.low[i])} to ${text(near.high[i])} over ${near.y.length} seeds` : "";
      this.tip.replaceChildren(html("b", "", near.label), `${text(near.mean[i])} `, html("span", "", `at ${this.data.xlabel} ${this.tick(near.xs[i])}`));
      if (range) this.tip.append(document.createElement("br"), html("span", "", range));
      place(this.tip, this.plot, this.x.at(x), clamp(this.y.at(near.mean[i]), this.box.top, this.box.bottom));
      this.live.textContent = `${near.label}: ${text(near.mean[i])} at ${this.data.xlabel} ${this.tick(near.xs[i])}${range ? `, ${range}` : ""}`;
    }

    tick(x) {
      return this.data.ticks?.find(([value]) => value === x)?.[1] ?? text(x);
    }

    // The table under the plot: values at the pointer, or else at each line's end.
    values(index, title, near) {
      const head = $(".at", this.figure);
      head.textContent = head.title = title;
      for (const line of this.lines) {
        const i = this.shown.includes(line) ? index(line) : -1;
        $(".y", line.row).textContent = i < 0 ? "" : text(line.mean[i], 4, false);
        const range = $("td.range", line.row);
        if (range) range.textContent = i < 0 || line.y.length < 2 || line.mean[i] === null ? "" : `${text(line.low[i], 3, false)}–${text(line.high[i], 3, false)}`;
        line.row.classList.toggle("near", line === near);
      }
    }

    leave() {
      this.here = null;
      this.over?.replaceChildren();
      if (this.tip) this.tip.hidden = true;
      this.values((line) => line.mean.reduce((found, v, i) => (v === null ? found : i), -1), "at the end", null);
    }
  }

  function place(tip, plot, x, y) {
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    tip.style.left = `${clamp(x + 12 + wide > plot.clientWidth ? x - wide - 12 : x + 12, 0, Math.max(0, plot.clientWidth - wide))}px`;
    tip.style.top = `${clamp(y - high - 10, -8, plot.clientHeight - high)}px`;
  }

  // Maps. Viridis from zero, red and blue around it: both are told apart by every kind of color vision.
  const SCALES = {
    sequential: ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"],
    diverging: ["#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f"],
  };
  const channels = (color) => [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  for (const name in SCALES) SCALES[name] = SCALES[name].map(channels);
  function shade(part, scale) {
    const at = clamp(part, 0, 1) * (scale.length - 1), i = Math.min(Math.floor(at), scale.length - 2);
    return scale[i].map((c, k) => Math.round(c + (at - i) * (scale[i + 1][k] - c)));
  }

  class Maps {
    constructor(figure, data) {
      Object.assign(this, { figure, data, plot: $(".plot", figure), live: $("output.live", figure), now: 0, cell: null });
      this.labels = data.maps.map(([label]) => label);
      this.maps = data.maps.map(([, values]) => values);
      this.scale = data.diverging ? SCALES.diverging : SCALES.sequential;
      this.slider = $("input[type=range]", figure);
      this.same = $(".same input", figure);
      this.slider?.addEventListener("input", () => this.choose(Number(this.slider.value)));
      this.same?.addEventListener("change", () => { this.thumbnails(); this.draw(); });
      this.plot.addEventListener("pointermove", (event) => this.point(event));
      this.plot.addEventListener("pointerdown", (event) => this.point(event));
      this.plot.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") this.leave(); });
      this.plot.addEventListener("blur", () => this.leave());
      this.plot.addEventListener("keydown", (event) => this.key(event));
    }

    choose(i) {
      this.now = i;
      this.slider.value = i;
      this.slider.setAttribute("aria-valuetext", this.labels[i]);
      $(".which output", this.figure).textContent = this.labels[i];
      $$(".thumbs canvas", this.figure).forEach((canvas, k) => canvas.classList.toggle("now", k === i));
      this.draw();
    }

    limits(i) {
      const values = (this.same?.checked ? this.maps : [this.maps[i]]).flat(2).filter((v) => v !== null);
      const top = values.reduce((a, v) => Math.max(a, Math.abs(v)), 0) || 1, least = values.reduce((a, v) => Math.min(a, v), 0);
      return this.data.diverging ? [-top, top] : [least, values.reduce((a, v) => Math.max(a, v), -Infinity) || 1];
    }

    paint(i) {
      const map = this.maps[i], rows = map.length, columns = map[0].length, [low, high] = this.limits(i);
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [columns, rows];
      const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
      map.forEach((row, r) => row.forEach((v, c) => {
        // What is not a number has no color.
        if (v !== null) image.data.set([...shade((v - low) / (high - low), this.scale), 255], 4 * (r * columns + c));
      }));
      context.putImageData(image, 0, 0);
      return canvas;
    }

    thumbnails() {
      const strip = $(".thumbs", this.figure);
      if (!strip) return;
      strip.replaceChildren(...this.maps.map((_, i) => {
        const canvas = this.paint(i);
        canvas.title = this.labels[i];
        canvas.classList.toggle("now", i === this.now);
        canvas.addEventListener("click", () => this.choose(i));
        return canvas;
      }));
    }

    draw() {
      const { plot, data } = this, width = plot.clientWidth, height = plot.clientHeight;
      if (!width) return;
      if (this.slider && !$(".thumbs .now", this.figure)) this.thumbnails();
      const map = this.maps[this.now], rows = map.length, columns = map[0].length;
      const left = 34, top = data.ylabel ? 20 : 6, bottom = 34, right = 58;
      let w = width - left - right, h = height - top - bottom;
      // Cells are squares unless that would leave a ribbon.
      if (columns / rows > 1 / 3 && columns / rows < 3) { const size = Math.min(w / columns, h / rows); [w, h] = [size * columns, size * rows]; }
      this.box = { left, top, w, h, rows, columns };
      const canvas = this.paint(this.now);
      const part = (length, whole) => `${(100 * length) / whole}%`;
      Object.assign(canvas.style, { left: part(left, width), top: part(top, height), width: part(w, width), height: part(h, height) });
      const svg = sheet(width, height);
      for (const [value] of linearTicks(0, columns - 1, Math.min(columns, w / 40), true)) svg.append(make("text", { x: left + ((value + 0.5) * w) / columns, y: top + h + 14, "text-anchor": "middle" }, text(value)));
      for (const [value] of linearTicks(0, rows - 1, Math.min(rows, h / 34), true)) svg.append(make("text", { x: left - 6, y: top + ((value + 0.5) * h) / rows + 4, "text-anchor": "end" }, text(value)));
      svg.append(make("text", { x: left + w, y: top + h + 29, "text-anchor": "end" }, data.xlabel), make("text", { x: 0, y: 10 }, data.ylabel));
      const [low, high] = this.limits(this.now), gradient = make("linearGradient", { id: `scale-${this.figure.id}`, x1: 0, x2: 0, y1: 1, y2: 0 });
      this.scale.forEach((color, i) => gradient.append(make("stop", { offset: i / (this.scale.length - 1), "stop-color": `rgb(${color})` })));
      const bar = left + w + 12;
      svg.append(gradient, make("rect", { x: bar, y: top, width: 9, height: h, fill: `url(#${gradient.id})` }));
      for (const value of low < 0 && high > 0 ? [low, 0, high] : [low, (low + high) / 2, high]) svg.append(make("text", { x: bar + 13, y: clamp(top + h * (1 - (value - low) / (high - low)) + 4, top + 8, top + h) }, text(value, 2)));
      this.over = make("g");
      svg.append(this.over);
      this.tip = html("div", "tip");
      plot.replaceChildren(canvas, svg, this.tip);
      if (this.cell) this.show(...this.cell, false); else this.leave();
    }

    point(event) {
      const { left, top, w, h, rows, columns } = this.box, area = this.plot.getBoundingClientRect();
      const c = Math.floor(((event.clientX - area.left - left) / w) * columns), r = Math.floor(((event.clientY - area.top - top) / h) * rows);
      if (r >= 0 && c >= 0 && r < rows && c < columns) this.show(r, c); else this.leave();
    }

    key(event) {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      if (event.key === "Escape") return this.leave();
      if (!(event.key in moves)) return;
      event.preventDefault();
      const [r, c] = this.cell ?? [0, 0], [dr, dc] = this.cell ? moves[event.key] : [0, 0];
      this.show(clamp(r + dr, 0, this.box.rows - 1), clamp(c + dc, 0, this.box.columns - 1));
    }

    show(r, c, aloud = true) {
      this.cell = [r, c];
      const { left, top, w, h, rows, columns } = this.box, cw = w / columns, ch = h / rows, value = this.maps[this.now][r]?.[c];
      const frame = { x: left + c * cw, y: top + r * ch, width: cw, height: ch };
      this.over.replaceChildren(make("rect", { class: "cell", ...frame }), make("rect", { class: "cell over", ...frame }));
      const where = `${this.data.ylabel || "row"} ${r}, ${this.data.xlabel || "column"} ${c}`;
      this.tip.replaceChildren(html("b", "", text(value)), html("span", "", where));
      this.tip.hidden = false;
      place(this.tip, this.plot, left + (c + 0.5) * cw, top + r * ch);
      if (aloud) this.live.textContent = `${this.labels[this.now]}, ${where}: ${text(value)}`;
    }

    leave() {
      this.cell = null;
      this.over?.replaceChildren();
      if (this.tip) this.tip.hidden = true;
    }
  }

  function filters() {
    const bodies = $$("tbody.claim"), buttons = $$(".verdicts button"), figure = $("#filter-figure"), find = $("#filter-text");
    let verdict = "";
    const apply = () => {
      const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const body of bodies) {
        const { dataset } = body;
        body.hidden = !((!verdict || dataset.verdict === verdict) && (!figure.value || dataset.figure === figure.value) && words.every((word) => dataset.text.includes(word)));
        count += !body.hidden;
      }
      $("#shown").textContent = count;
      $(".none").hidden = count > 0;
    };
    const choose = (value) => {
      verdict = value;
      for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.verdict === value);
      apply();
    };
    for (const button of buttons) button.addEventListener("click", () => choose(button.dataset.verdict));
    figure.addEventListener("change", apply);
    find.addEventListener("input", apply);
    $(".filters").addEventListener("submit", (event) => event.preventDefault());
    $(".filters").reset();
    // A link leads to its claim or model, also where a filter or a fold hides it.
    const reveal = () => {
      const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
      if (!target) return;
      if (target.matches("tbody.claim") && target.hidden) { figure.value = find.value = ""; choose(""); target.scrollIntoView(); }
      if (target.matches("details")) target.open = true;
    };
    addEventListener("hashchange", reveal);
    apply();
    reveal();
  }

  function figures() {
    const data = JSON.parse($("#data").textContent), panels = new Map();
    for (const section of $$("section.figure")) {
      const settings = { seeds: "mean", variant: "as_run" }, mine = [];
      for (const figure of $$(".panel", section)) {
        const content = data[section.dataset.figure][Number(figure.dataset.panel)];
        if (figure.matches(".drawing")) continue;
        const panel = figure.matches(".curves") ? new Curves(figure, content, settings) : new Maps(figure, content);
        panels.set(panel.plot, panel);
        if (panel instanceof Curves) mine.push(panel);
      }
      for (const name of ["seeds", "variant"]) {
        const buttons = $$(`.controls button[data-${name}]`, section);
        for (const button of buttons) button.addEventListener("click", () => {
          settings[name] = button.dataset[name];
          for (const other of buttons) other.setAttribute("aria-pressed", other === button);
          mine.forEach((panel) => panel.draw());
        });
      }
    }
    // Drawn when they come near, and again when their width changes; all of them before printing.
    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) { near.unobserve(entry.target); sizes.observe(entry.target); }
    }, { rootMargin: "900px" });
    const sizes = new ResizeObserver((entries) => { for (const entry of entries) panels.get(entry.target).draw(); });
    for (const plot of panels.keys()) near.observe(plot);
    addEventListener("beforeprint", () => panels.forEach((panel) => panel.draw()));
  }

  function whereabouts() {
    const links = new Map($$(".jump a").map((link) => [link.getAttribute("href").slice(1), link]));
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const link = links.get(entry.target.id);
        if (!entry.isIntersecting) { link.removeAttribute("aria-current"); continue; }
        link.setAttribute("aria-current", "true");
        const strip = link.parentElement;
        strip.scrollLeft = link.offsetLeft - strip.offsetLeft - strip.clientWidth / 2;
      }
    }, { rootMargin: "-30% 0px -69% 0px" });
    for (const id of links.keys()) { const section = document.getElementById(id); if (section) seen.observe(section); }
  }

  document.addEventListener("DOMContentLoaded", () => { themeButton(); filters(); figures(); whereabouts(); });
})();
