"use strict";
// The table of single requests, and the panel with the timeline of one; a click on a dot of a chart opens it as well.
(() => {
  const { total, rows } = JSON.parse(document.getElementById("requests-data").textContent);
  const section = document.getElementById("requests");
  const table = section.querySelector("table");
  const panel = document.getElementById("request");
  const PAGE = 12;
  const DRAWN_TOKENS = 400; // more than that is a grey bar
  let order = [], sorted = "due", falling = false, page = 0, open = null;

  const span = (from, to) => (from == null || to == null ? null : (to - from) * 1000);
  const figures = {
    due: (one) => one.due,
    ttft: (one) => span(one.due, one.first),
    tpot: (one) => (one.tpot == null ? null : one.tpot * 1000),
    e2e: (one) => (one.sent == null ? null : span(one.due, one.end)),
    prompt: (one) => one.prompt,
    cached: (one) => one.cached,
    output: (one) => one.output,
  };
  const ms = (value) => {
    if (value == null) return "–";
    if (Math.abs(value) >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 1 : 2)} s`;
    return `${value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)} ms`;
  };
  const count = (value) => (value == null ? "–" : value.toLocaleString("en"));
  const seconds = (value) => `${value.toFixed(3)} s`;
  const columns = [
    ["request", null, (one) => named(one)],
    ["due", "due", (one) => seconds(one.due)],
    ["TTFT", "ttft", (one) => ms(figures.ttft(one))],
    ["TPOT", "tpot", (one) => ms(figures.tpot(one))],
    ["E2E", "e2e", (one) => ms(figures.e2e(one))],
    ["prompt tokens", "prompt", (one) => count(one.prompt)],
    ["cached", "cached", (one) => count(one.cached)],
    ["output tokens", "output", (one) => count(one.output)],
    ["backend", null, (one) => one.backend || "–"],
    ["outcome", null, (one) => one.outcome],
  ].filter(([, figure, ]) => figure !== "cached" || rows.some((one) => one.cached != null))
    .filter(([title]) => title !== "backend" || rows.some((one) => one.backend));

  const make = (tag, text, more = {}) => Object.assign(document.createElement(tag), text == null ? {} : { textContent: text }, more);
  const named = (one) => `${one.index}${one.turn ? `, turn ${one.turn + 1}` : ""}`;

  const arrange = () => {
    const which = section.querySelector("select").value;
    order = rows.map((_, at) => at).filter((at) =>
      which === "all" || (which === "failed" ? rows[at].failed : rows[at].backend === which.slice(1)));
    const of = figures[sorted], sign = falling ? -1 : 1;
    // What has no such figure is last either way.
    order.sort((a, b) => {
      const one = of(rows[a]), other = of(rows[b]);
      return one == null || other == null ? (one == null) - (other == null) : sign * (one - other);
    });
    page = 0;
    fill();
  };

  const fill = () => {
    const head = make("tr");
    for (const [title, figure] of columns) {
      const cell = make("th");
      if (figure) {
        const button = make("button", title + (figure === sorted ? (falling ? " ↓" : " ↑") : ""), { type: "button" });
        button.onclick = () => {
          falling = figure === sorted ? !falling : figure !== "due";
          sorted = figure;
          arrange();
        };
        cell.append(button);
      } else cell.textContent = title;
      head.append(cell);
    }
    const shown = order.slice(page * PAGE, (page + 1) * PAGE).map((at) => {
      const row = make("tr", null, { tabIndex: 0, className: `${rows[at].failed ? "bad" : ""}${at === open ? " open" : ""}` });
      row.dataset.row = at;
      row.onclick = () => show(at);
      row.onkeydown = (event) => { if (event.key === "Enter") show(at); };
      for (const [title, , text] of columns) {
        const cell = make("td", text(rows[at]));
        cell.dataset.title = title;
        row.append(cell);
      }
      return row;
    });
    table.replaceChildren(head, ...shown);
    const pages = Math.max(1, Math.ceil(order.length / PAGE));
    const [back, where, on] = section.querySelectorAll(".pager > *");
    back.disabled = page === 0;
    on.disabled = page === pages - 1;
    where.textContent = `${page + 1} of ${pages}`;
    section.querySelector(".count").textContent = total > rows.length
      ? `${count(order.length)} shown of ${count(total)}: failed ones, the slowest, and every n-th of the others`
      : count(order.length);
  };

  // Left and width in percent of the time from when it was due to its end.
  const part = (one, from, to, style, title) => {
    const length = Math.max(one.end - one.due, 1e-6);
    const piece = make("i", null, { className: style, title });
    piece.style.left = `${(100 * (from - one.due)) / length}%`;
    piece.style.width = `${(100 * Math.max(0, to - from)) / length}%`;
    return piece;
  };

  const track = (one) => {
    const line = make("div", null, { className: "track" });
    if (one.sent == null) return line;
    const began = Math.min(one.end, one.sent + (one.queue || 0)), first = one.first ?? one.end;
    line.append(part(one, one.due, one.sent, "late", "late: due, and not sent yet"));
    if (one.queue) line.append(part(one, one.sent, began, "queued", "in the gateway's queue"));
    line.append(part(one, Math.min(began, first), first, "waited", "until the first token"));
    if (one.first != null) {
      const decode = part(one, first, one.end, "decode", "tokens");
      if (one.output > 1 && one.output <= DRAWN_TOKENS) {
        decode.classList.add("ticks");
        decode.style.backgroundSize = `${100 / (one.output - 1)}% 100%`;
      }
      line.append(decode);
    }
    if (one.pause) line.append(part(one, Math.max(one.due, one.pause[0]), one.pause[1], "pause", "the longest time without a byte"));
    return line;
  };

  const moments = (one) => {
    const found = [["due", one.due, ""]];
    if (one.sent == null) return [...found, ["dropped", one.end, "never sent: --max-in-flight was reached"]];
    found.push(["sent", one.sent, one.sent > one.due + 0.0005 ? `${ms(span(one.due, one.sent))} late` : ""]);
    if (one.queue) found.push(["left the gateway's queue", one.sent + one.queue, `after ${ms(one.queue * 1000)}`]);
    if (one.first != null) found.push(["first token", one.first, `TTFT ${ms(figures.ttft(one))}`]);
    const each = figures.tpot(one) == null ? "" : `TPOT ${ms(figures.tpot(one))}; `;
    const reads = one.reads ? `${count(one.events)} events in ${count(one.reads)} reads` : "";
    found.push([one.failed ? one.outcome : "end", one.end, `${each}${reads}`]);
    if (one.pause) found.push(["longest pause", one.pause[0], `${ms(span(...one.pause))} without a byte`]);
    return found;
  };

  const facts = (one) => [
    ["status", one.status], ["outcome", one.outcome], ["error", one.detail],
    ["prompt tokens", one.prompt == null ? null : count(one.prompt) + (one.cached == null ? "" : `, ${count(one.cached)} of them cached`)],
    ["hit predicted by the gateway", one.predicted == null ? null : `${count(one.predicted)} tokens`],
    ["output tokens", one.output == null ? null : count(one.output) + (one.asked ? ` of ${count(one.asked)} asked for` : "")],
    ["E2E", ms(figures.e2e(one))], ["backend", one.backend], ["part of the mix", one.part], ["group", one.group],
  ].filter(([, value]) => value != null && value !== "");

  const listed = (pairs) => {
    const list = make("table");
    for (const cells of pairs) {
      const row = make("tr");
      row.append(...cells.map((text) => make("td", String(text))));
      list.append(row);
    }
    return list;
  };

  const show = (at) => {
    open = at;
    const one = rows[at];
    panel.querySelector("b").textContent = `Request ${named(one)}`;
    const body = panel.querySelector(".body");
    const lists = make("div", null, { className: "lists" });
    lists.append(listed(moments(one).map(([what, when, note]) => [what, seconds(when), note])), listed(facts(one)));
    const legend = make("p", null, { className: "note legend" });
    const named_parts = [["late", "late"], ["queued", "gateway's queue"], ["waited", "to the first token"],
      ["decode", one.output > 1 && one.output <= DRAWN_TOKENS ? "tokens, drawn evenly" : "tokens"], ["pause", "longest pause"]];
    for (const [style, text] of named_parts) {
      if (style === "queued" && !one.queue) continue;
      legend.append(make("i", null, { className: style }), make("span", text));
    }
    body.replaceChildren(track(one), legend, lists);
    if (!panel.open) panel.show();
    fill();
  };
  const step = (by) => {
    const next = order[order.indexOf(open) + by];
    if (next != null) show(next);
  };

  const select = section.querySelector("select");
  const choices = [["all", "all requests"]];
  if (rows.some((one) => one.failed)) choices.push(["failed", "failed ones"]);
  const backends = [...new Set(rows.map((one) => one.backend).filter(Boolean))].sort();
  if (backends.length > 1) for (const name of backends) choices.push([`=${name}`, `on ${name}`]);
  select.append(...choices.map(([value, text]) => make("option", text, { value })));
  select.onchange = arrange;
  const [back, , on] = section.querySelectorAll(".pager > *");
  back.onclick = () => { page -= 1; fill(); };
  on.onclick = () => { page += 1; fill(); };
  const [before, after, close] = panel.querySelectorAll("button");
  before.onclick = () => step(-1);
  after.onclick = () => step(1);
  close.onclick = () => { panel.close(); open = null; fill(); };
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && panel.open) close.onclick(); });
  document.addEventListener("request", (event) => show(event.detail));
  section.hidden = false;
  arrange();
})();
