// Puts the page together: tabs, the token, and one stream whose state is given to the view that is open.
import { follow, token, worker } from "./connection.js";
import { duration, h, put } from "./dom.js";
import { configuration } from "./configuration.js";
import { fleet } from "./fleet.js";
import { gateway } from "./gateway.js";
import { playground } from "./playground.js";
import { queue } from "./queue.js";
import { requests } from "./requests.js";
import { saved } from "./saved.js";
import { timeline } from "./timeline.js";

const MOST_ROWS = 200, MOST_EVENTS = 500, MOST_POINTS = 600;
const VIEWS = { fleet, queue, requests, saved, timeline, gateway, configuration, playground };
const NAMES = { fleet: "Fleet", queue: "Queue", requests: "Requests", saved: "Saved work", timeline: "Errors",
  gateway: "Gateway", configuration: "Configuration", playground: "Playground" };
const at = (id) => document.getElementById(id);
const state = { requests: [], failed: [], events: [], points: [], columns: {}, settings: {}, requestsSeen: 0, eventsSeen: 0 };
let open = null;

// Rows are told apart by their place in the stream: clients choose request ids, and may repeat them.
let epoch = 0;
const numbered = (rows, from, mark = "") => { rows.forEach((row, index) => { row.key = `${epoch}${mark}:${from + index}`; }); return rows; };
const added = (list, seen, news, most) => {
  const fresh = numbered(news.rows, news.from).slice(Math.max(0, seen - news.from));
  list.push(...fresh);
  list.splice(0, Math.max(0, list.length - most));
  return [fresh, Math.max(seen, news.from + news.rows.length)];
};
const take = (kind, news) => {
  if (kind === "full") {
    const version = `${news.gateway.version} ${news.gateway.build}`;
    if (state.version && state.version !== version) return location.reload(); // the gateway was upgraded, and its page with it
    state.version = version;
    epoch += 1;
    numbered(news.failed, 0, "failed");
    Object.assign(state, { requests: numbered(news.requests.rows, news.requests.from), requestsSeen: news.requests.from + news.requests.rows.length,
      failed: news.failed, events: news.events.rows, eventsSeen: news.events.from + news.events.rows.length,
      points: news.history.points, columns: Object.fromEntries(news.history.columns.map((name, index) => [name, index])),
      settings: news.settings });
  } else {
    let fresh;
    [fresh, state.requestsSeen] = added(state.requests, state.requestsSeen, news.requests, MOST_ROWS);
    state.failed.push(...fresh.filter((row) => row.outcome !== "completed"));
    state.failed.splice(0, Math.max(0, state.failed.length - MOST_ROWS));
    [, state.eventsSeen] = added(state.events, state.eventsSeen, news.events, MOST_EVENTS);
    state.points.push(news.point);
    state.points.splice(0, Math.max(0, state.points.length - MOST_POINTS));
  }
  const { time, fleet, queue, traffic, gateway } = news;
  Object.assign(state, { time, fleet, queue, traffic, gateway });
  show();
};

const show = () => {
  if (!state.fleet) return;
  const { gateway, fleet, queue } = state;
  put(at("subtitle"), `${gateway.version} (${gateway.build}), up ${duration(gateway.uptime_seconds)}, ${state.settings.policy} routing${worker.name && `, worker ${worker.name}`}`);
  const bad = fleet.tiles.filter((tile) => tile.state !== "up").length;
  badge("fleet", bad || fleet.engines, bad > 0);
  badge("queue", queue.waiting, false);
  document.title = bad ? `(${bad}) Gateway` : "Gateway";
  if (!document.hidden && open) open.update(state);
  document.documentElement.dataset.time = state.time;
};
const badge = (view, text, bad) => {
  const node = at("tabs").querySelector(`a[data-view="${view}"] b`);
  put(node, text || "");
  node.hidden = !text;
  node.className = bad ? "bad" : "";
};

const openView = () => {
  const [name] = location.hash.slice(1).split("/");
  const view = VIEWS[name] ? name : "fleet";
  if (open) open.close?.();
  open = VIEWS[view]();
  at("view").replaceChildren(open.node);
  for (const link of at("tabs").children) {
    if (link.dataset.view === view) { link.setAttribute("aria-current", "page"); link.scrollIntoView({ block: "nearest", inline: "nearest" }); }
    else link.removeAttribute("aria-current");
  }
  document.documentElement.dataset.view = view;
  show();
};

const connect = () => {
  at("login").hidden = true;
  follow({
    message: take,
    state: (now, why) => {
      at("connection").className = now;
      put(at("connection").lastElementChild, now === "live" ? "live" : `${why}: connecting again`);
    },
    refused: () => {
      at("refused").hidden = !token.get();
      token.forget();
      at("login").hidden = false;
      at("connection").className = "lost";
      put(at("connection").lastElementChild, "needs the token");
      at("token").focus();
    },
  });
};

at("tabs").append(...Object.entries(NAMES).map(([view, name]) => h("a", { href: `#${view}`, "data-view": view }, name, h("b", { hidden: true }))));
at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(at("token").value);
  at("token").value = "";
  connect();
});
addEventListener("hashchange", openView);
document.addEventListener("visibilitychange", show);
openView();
connect();
