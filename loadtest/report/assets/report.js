"use strict";
// Draws the page's plots: values under the pointer, drag to zoom, double click to go back, a click on a name hides it.
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const HEIGHT = 230;
  let drawn = [];

  const digits = (value) => (value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2);
  const fixed = (value, places) =>
    value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
  const shown = (value, unit) => {
    if (value == null) return "";
    if (unit === "ms" && value >= 1000) return `${fixed(value / 1000, value >= 10000 ? 1 : 2)} s`;
    const places = unit === "ms" ? (value >= 100 ? 0 : value >= 10 ? 1 : 2) : digits(value);
    return fixed(value, places) + (unit ? ` ${unit}` : "");
  };

  const probe = document.createElement("i");
  probe.hidden = true;
  document.body.append(probe);
  const colour = (style) => {
    probe.className = style;
    return getComputedStyle(probe).color;
  };
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const faint = (rgb) => rgb.replace(/^rgb\((.*)\)$/, "rgba($1, 0.14)");

  // A value between two gaps has no line to be seen by.
  const alone = (u, series) => {
    const values = u.data[series];
    const shown = [];
    for (let at = 0; at < values.length; at++)
      if (values[at] != null && values[at - 1] == null && values[at + 1] == null) shown.push(at);
    return shown;
  };

  const line = (told, unit) => {
    const stroke = colour(told.style);
    const dashed = / dashed\b/.test(told.style), apart = / apart\b/.test(told.style);
    return {
      label: told.name,
      stroke,
      width: dashed ? 1.5 : 2,
      dash: dashed ? [5, 4] : undefined,
      fill: told.area ? faint(stroke) : undefined,
      paths: apart ? () => null : told.steps ? uPlot.paths.stepped({ align: 1 }) : undefined,
      spanGaps: told.joined,
      points: told.spread ? { show: true } : told.joined ? {} : { show: false, size: 6, filter: alone },
      value: (_, value, at, index) => {
        const ends = told.spread && index != null && told.spread[index];
        const range = ends && ends[0] !== ends[1] ? ` (${shown(ends[0], unit)} to ${shown(ends[1], unit)})` : "";
        return shown(value, unit) + range;
      },
    };
  };

  const inRange = (plot) => plot.bounds.filter(([value]) => value >= plot.y.range[0] && value <= plot.y.range[1]);

  // The names of limits, on the card's colour: dots and lines may be behind them.
  const limits = (u, plot, styles) => {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    const write = (text, left, top) => {
      const wide = ctx.measureText(text).width;
      ctx.fillStyle = styles.card;
      ctx.globalAlpha = 0.8;
      ctx.fillRect(left - 2 * ratio, top - 11 * ratio, wide + 4 * ratio, 14 * ratio);
      ctx.globalAlpha = 1;
      ctx.fillStyle = styles.bad;
      ctx.fillText(text, left, top);
    };
    ctx.textAlign = "left";
    for (const [value, text] of inRange(plot)) {
      const at = u.valToPos(value, "y", true);
      write(text, bbox.left + 5 * ratio, at + (at - bbox.top < 18 * ratio ? 14 : -4) * ratio);
    }
    for (const [value, text] of plot.uprights) {
      const at = u.valToPos(value, "x", true), wide = ctx.measureText(text).width;
      if (!text || at > bbox.left + bbox.width || at < bbox.left) continue;
      const room = bbox.left + bbox.width - at > wide + 8 * ratio;
      write(text, room ? at + 4 * ratio : at - wide - 4 * ratio, bbox.top + bbox.height - 6 * ratio);
    }
  };

  const beneath = (plot, styles) => (u) => {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    if (plot.dots) {
      ctx.fillStyle = styles.dot;
      plot.dots[0].forEach((x, index) => {
        const size = 3 * ratio;
        const left = u.valToPos(x, "x", true), top = u.valToPos(plot.dots[1][index], "y", true);
        ctx.fillRect(left - size / 2, top - size / 2, size, size);
      });
    }
    ctx.fillStyle = styles.bad;
    const foot = bbox.top + bbox.height;
    for (const x of plot.marks) ctx.fillRect(u.valToPos(x, "x", true) - ratio / 2, foot - 7 * ratio, 1.5 * ratio, 7 * ratio);
    plot.lines.forEach((told, index) => {
      if (!told.spread || !u.series[index + 1].show) return;
      ctx.fillStyle = colour(told.style);
      told.spread.forEach((ends, at) => {
        if (!ends) return;
        const left = u.valToPos(u.data[0][at], "x", true);
        const high = u.valToPos(ends[1], "y", true), low = u.valToPos(ends[0], "y", true);
        ctx.fillRect(left - ratio, high, 2 * ratio, Math.max(low - high, ratio));
        for (const end of [high, low]) ctx.fillRect(left - 4 * ratio, end - ratio / 2, 8 * ratio, ratio);
      });
    });
    ctx.lineWidth = 2 * ratio;
    for (const [style, points] of plot.routes) {
      const at = plot.lines.findIndex((told) => told.style.split(" ")[0] === style.split(" ")[0]);
      if (at >= 0 && !u.series[at + 1].show) continue;
      ctx.strokeStyle = colour(style);
      ctx.setLineDash(/ dashed\b/.test(style) ? [5 * ratio, 4 * ratio] : []);
      ctx.beginPath();
      for (const [x, y] of points) ctx.lineTo(u.valToPos(x, "x", true), u.valToPos(y, "y", true));
      ctx.stroke();
    }
    // Limits: a dashed line each; their names are drawn above everything.
    ctx.strokeStyle = styles.bad;
    ctx.setLineDash([6 * ratio, 4 * ratio]);
    ctx.lineWidth = ratio;
    const right = bbox.left + bbox.width;
    for (const [value] of inRange(plot)) {
      const at = u.valToPos(value, "y", true);
      ctx.beginPath();
      ctx.moveTo(bbox.left, at);
      ctx.lineTo(right, at);
      ctx.stroke();
    }
    for (const [value] of plot.uprights) {
      const at = u.valToPos(value, "x", true);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, foot);
      ctx.stroke();
    }
    ctx.restore();
  };

  // Texts at points, and rings around those that stand out.
  const above = (plot, styles) => (u) => {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    const place = (x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
    ctx.save();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    limits(u, plot, styles);
    ctx.fillStyle = styles.soft;
    const taken = [];
    for (const [x, y, text] of plot.labels) {
      const [left, top] = place(x, y);
      const wide = ctx.measureText(text).width + 9 * ratio;
      // Where throughput rises with latency, the line leaves the corner above and to the left free.
      const onRight = left - wide < bbox.left;
      const box = [onRight ? left : left - wide, top + (top - bbox.top < 18 * ratio ? 15 : -6) * ratio, wide];
      // A text over another one can be read by nobody: the first one stays.
      if (taken.some((other) => Math.abs(box[1] - other[1]) < 13 * ratio && box[0] < other[0] + other[2] && other[0] < box[0] + box[2]))
        continue;
      taken.push(box);
      ctx.textAlign = onRight ? "left" : "right";
      ctx.fillText(text, left + (onRight ? 6 : -6) * ratio, box[1]);
    }
    ctx.strokeStyle = styles.good;
    ctx.lineWidth = 2.5 * ratio;
    for (const [x, y] of plot.ringed) {
      ctx.beginPath();
      ctx.arc(...place(x, y), 8 * ratio, 0, 2 * Math.PI);
      ctx.stroke();
    }
    ctx.restore();
  };

  // The shown request whose dot is nearest to a pointer, within a finger's width.
  const dotAt = (u, plot, event) => {
    let found = null, nearest = 12;
    plot.dotRows.forEach((row, index) => {
      const away = Math.hypot(
        u.valToPos(plot.dots[0][index], "x") - event.offsetX, u.valToPos(plot.dots[1][index], "y") - event.offsetY);
      if (away < nearest) [found, nearest] = [row, away];
    });
    return found;
  };
  const opening = (plot) => (u) => {
    u.root.classList.add("idle");
    if (!plot.dotRows.length) return;
    let down = 0;
    u.over.addEventListener("mousedown", (event) => { down = event.clientX; });
    u.over.addEventListener("mousemove", (event) => { u.over.style.cursor = dotAt(u, plot, event) == null ? "" : "pointer"; });
    u.over.addEventListener("click", (event) => {
      const row = Math.abs(event.clientX - down) < 4 ? dotAt(u, plot, event) : null;
      if (row != null) document.dispatchEvent(new CustomEvent("request", { detail: row }));
    });
  };

  const options = (plot, width) => {
    const { x, y } = plot;
    const styles = { dot: variable("--dot"), bad: variable("--bad"), soft: variable("--soft"), line: variable("--line"),
      good: variable("--good"), card: variable("--card") };
    const names = (ticks) => (u, splits) => splits.map((split) => (ticks.find(([at]) => at === split) || ["", ""])[1]);
    // Where there is no room for all names along the foot, every n-th is left.
    const thinned = (ticks) => (u, splits) => {
      const all = names(ticks)(u, splits), widest = 8 * Math.max(1, ...all.map((name) => name.length));
      const step = Math.ceil((all.length * widest * devicePixelRatio) / u.bbox.width);
      return all.map((name, at) => (at % step ? "" : name));
    };
    const axis = { stroke: styles.soft, grid: { stroke: styles.line, width: 1 }, ticks: { stroke: styles.line, width: 1 },
      font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 18 };
    const titled = (told) => ({ ...axis, label: told.title || undefined });
    const inside = (u) => x.ticks.map(([at]) => at).filter((at) => at >= u.scales.x.min && at <= u.scales.x.max);
    // Asked for all that there is, it shows the whole axis; anything else was dragged.
    const all = (low, high) => low === plot.data[0][0] && high === plot.data[0].at(-1);
    return {
      width,
      height: HEIGHT,
      padding: [null, 30, null, null],
      cursor: { sync: x.time ? { key: "time", scales: ["x", null] } : undefined, drag: { x: true, y: false },
        points: { size: 7 } },
      scales: {
        x: { time: false, range: (u, low, high) => (all(low, high) ? x.range : [low, high]) },
        y: { distr: y.log ? 3 : 1, range: () => y.range },
      },
      axes: [
        x.time
          ? { ...titled(x), values: (u, splits) => splits.map((split) => `${+split.toFixed(3)} s`), size: 32 }
          : { ...titled(x), splits: inside, values: thinned(x.ticks), size: 32 },
        { ...titled(y), splits: () => y.ticks.map(([at]) => at), filter: (u, splits) => splits, values: names(y.ticks), size: 62 },
      ],
      series: [
        { label: "at", value: (u, value, at, index) => {
          if (index == null) return "";
          return (x.labels && x.labels[index]) || (x.time ? `${+u.data[0][index].toFixed(2)} s` : shown(value, x.unit));
        } },
        ...plot.lines.map((told) => line(told, y.unit)),
      ],
      hooks: { drawAxes: [beneath(plot, styles)], draw: [above(plot, styles)],
        ready: [opening(plot)], setLegend: [(u) => u.root.classList.toggle("idle", u.cursor.idx == null)] },
    };
  };

  const draw = () => {
    for (const u of drawn) u.destroy();
    drawn = [];
    for (const place of document.querySelectorAll("[data-plot]")) {
      const plot = plots[place.dataset.plot];
      drawn.push(new uPlot(options(plot, Math.max(280, place.clientWidth)), plot.data, place));
    }
    document.documentElement.dataset.drawn = drawn.length;
  };

  const sized = new ResizeObserver(() => {
    for (const u of drawn) {
      const width = Math.max(280, u.root.parentElement.clientWidth);
      if (width !== u.width) u.setSize({ width, height: HEIGHT });
    }
  });
  draw();
  for (const place of document.querySelectorAll("[data-plot]")) sized.observe(place);
  dark.addEventListener("change", draw);
})();
