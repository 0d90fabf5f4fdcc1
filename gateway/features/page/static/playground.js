// Sends one request as a client would, through the gateway's client port, and shows its curl command.
import { ask, askJson } from "./connection.js";
import { prices } from "./requests.js";
import { h, milliseconds, put } from "./dom.js";

const SAMPLES = {
  "/v1/chat/completions": (model) => ({ model, stream: true, max_tokens: 200, messages: [{ role: "user", content: "What does a gateway do?" }] }),
  "/v1/completions": (model) => ({ model, stream: true, max_tokens: 100, prompt: "A gateway is" }),
  "/v1/responses": (model) => ({ model, stream: true, max_output_tokens: 200, input: "What does a gateway do?" }),
  "/v1/messages": (model) => ({ model, stream: true, max_tokens: 200, messages: [{ role: "user", content: "What does a gateway do?" }] }),
  "/v1/embeddings": (model) => ({ model, input: ["What does a gateway do?"] }),
  "/v1/rerank": (model) => ({ model, query: "gateway", documents: ["a door", "a router"] }),
};
const kept = { path: "/v1/chat/completions", model: "", body: "" }; // while the page is open: views are made anew
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** The text in a streamed event, of the APIs above; null if it has none. */
const textOf = (data) => {
  const choice = data.choices?.[0];
  return choice?.delta?.content ?? choice?.delta?.reasoning_content ?? choice?.text ?? (data.type === "response.output_text.delta" ? data.delta : null) ?? data.delta?.text ?? null;
};

export const playground = () => {
  const path = h("select", { id: "path" }, Object.keys(SAMPLES).map((each) => h("option", { value: each, selected: each === kept.path }, each)));
  const model = h("select", { id: "model" }), key = h("input", { id: "key", type: "password", autocomplete: "off", placeholder: "API key" });
  const body = h("textarea", { id: "body", spellcheck: "false" }), curl = h("pre", { id: "curl" }), note = h("p", { className: "soft", id: "note" });
  const send = h("button", { className: "first", id: "send" }, "Send"), stop = h("button", { disabled: true }, "Stop"), dry = h("button", { id: "dry" }, "Where would it go?");
  const answer = h("pre", { id: "answer", "data-empty": "No answer." }), raw = h("pre", {}), decision = h("div", {});
  let settings = null, abort = null;

  const sample = () => { body.value = JSON.stringify(SAMPLES[path.value](model.value), null, 2); changed(); };
  const changed = () => {
    Object.assign(kept, { path: path.value, model: model.value, body: body.value });
    if (!settings) return;
    const url = `${settings.tls ? "https" : "http"}://${location.hostname}:${settings.port}${path.value}`;
    put(curl, [`curl -N ${quoted(url)}`, "-H 'content-type: application/json'", settings.keys && `-H "authorization: Bearer $API_KEY"`, `-d ${quoted(body.value)}`].filter(Boolean).join(" \\\n  "));
  };
  path.addEventListener("change", sample);
  model.addEventListener("change", () => {
    try {
      body.value = JSON.stringify({ ...JSON.parse(body.value), model: model.value }, null, 2);
      changed();
    } catch { sample(); }
  });
  body.addEventListener("input", changed);

  const read = async (response, started) => {
    const isStream = (response.headers.get("content-type") || "").startsWith("text/event-stream");
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "", first = null, events = 0;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      text += value;
      put(raw, (raw.textContent + value).slice(-20000));
      if (!isStream) continue;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const data = text.slice(0, end).split("\n").find((line) => line.startsWith("data: "))?.slice(6);
        if (!data || data === "[DONE]") continue;
        events += 1;
        const piece = textOf(JSON.parse(data));
        if (piece) { first ??= performance.now() - started; answer.append(piece); }
      }
    }
    if (!isStream) put(answer, text.length > 20000 ? `${text.slice(0, 20000)} …` : text);
    return { first, events };
  };
  send.addEventListener("click", async () => {
    const started = performance.now();
    abort = new AbortController();
    send.disabled = true; stop.disabled = false;
    for (const place of [answer, raw, decision]) place.replaceChildren();
    put(note, "waiting");
    try {
      const response = await ask(`/admin/dashboard/playground?path=${encodeURIComponent(path.value)}`, { method: "POST", body: body.value, signal: abort.signal,
        headers: { "content-type": "application/json", ...(key.value ? { "x-playground-key": key.value } : {}) } });
      const { first, events } = await read(response, started), told = (name) => response.headers.get(name);
      put(note, [`${response.status} in ${milliseconds(performance.now() - started)}`, first != null && `first text after ${milliseconds(first)}`, events && `${events} events`,
        told("x-gateway-backend") && `backend ${told("x-gateway-backend")}`, told("x-gateway-queue-ms") && `${told("x-gateway-queue-ms")} ms in the queue`,
        told("x-gateway-prefix-tokens") && `predicted hit ${told("x-gateway-prefix-tokens")} tokens`].filter(Boolean).join(", "));
      const id = told("x-request-id");
      if (id) await askJson(`/admin/dashboard/decisions/${encodeURIComponent(id)}`).then((found) => decision.replaceChildren(h("h2", {}, "Its placement"), prices(found, told("x-gateway-backend"))), () => {});
    } catch (error) {
      put(note, error.name === "AbortError" ? "stopped" : `${error.status ? `${error.status}: ` : ""}${error.message}`);
    }
    send.disabled = false; stop.disabled = true;
  });
  stop.addEventListener("click", () => abort?.abort());
  dry.addEventListener("click", async () => {
    try {
      const found = await askJson(`/admin/route?path=${encodeURIComponent(path.value)}`, { method: "POST", body: body.value });
      for (const place of [answer, raw]) place.replaceChildren(); // they are not of this request
      decision.replaceChildren(prices({ ...found, in_seconds: found.policy === "prefix", engines: found.backends }, found.waits ? "" : found.chosen.split("#")[0], "Where it would go now"));
      put(note, found.waits ? `It would wait: ${found.queued_requests} requests wait already.` : "Nothing was sent.");
    } catch (error) {
      put(note, error.message);
    }
  });
  return {
    node: h("div", {}, h("div", { className: "tools" }, h("label", {}, "Path", path), h("label", {}, "Model", model), h("label", {}, "Key", key), send, stop, dry),
      h("div", { className: "two" },
        h("section", {}, h("h2", {}, "Request"), body, h("h2", {}, "The same with curl"), h("div", { className: "card text" }, curl)),
        h("section", {}, h("h2", {}, "Answer"), note, h("div", { className: "card text" }, answer), h("details", {}, h("summary", { className: "soft" }, "as it came"), raw))),
      decision),
    update: (state) => {
      const before = settings;
      settings = state.settings;
      if (before) return;
      const models = [...new Set([...state.fleet.tiles.flatMap((tile) => tile.models), ...settings.aliases])];
      model.replaceChildren(...models.map((each) => h("option", { value: each, selected: each === kept.model }, each)));
      key.parentElement.hidden = !settings.keys;
      if (settings.client_certificates) { send.disabled = true; put(note, "The client port needs client certificates: use curl."); }
      if (kept.body) { body.value = kept.body; changed(); } else sample();
    },
    close: () => abort?.abort(),
  };
};
