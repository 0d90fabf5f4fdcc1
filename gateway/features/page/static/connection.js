// The live stream, and requests to the admin port, with the token of this tab. EventSource cannot send headers,
// so the stream is read with fetch.
const TOKEN = "gateway-admin-token";
const RETRY_MS = [500, 1000, 2000, 5000];
const SILENCE_MS = 120000;
const HIDDEN_MS = 60000; // then a hidden page stops watching

export const token = {
  get: () => sessionStorage.getItem(TOKEN) || "",
  set: (value) => sessionStorage.setItem(TOKEN, value),
  forget: () => sessionStorage.removeItem(TOKEN),
};
// Of several workers, the one that this page's path names answers it; without one in the path, the first.
const BASE = (location.pathname.match(/^\/worker\/\d+/) || [""])[0];
export const worker = { name: "" }; // such as "0 of 2"; empty = the gateway is one process
const headers = (more) => ({ ...(token.get() ? { authorization: `Bearer ${token.get()}` } : {}), ...more });

/** Requests a path of the admin port; an error answer becomes an Error with the gateway's message. */
export const ask = async (path, options = {}) => {
  const answer = await fetch(BASE + path, { ...options, headers: headers(options.headers), cache: "no-store" });
  worker.name = (answer.headers.get("x-gateway-worker") || "").replace("/", " of ");
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text || `HTTP ${answer.status}`;
  try {
    const told = JSON.parse(text).error;
    message = typeof told === "string" ? told : told.message || message;
  } catch { /* not JSON */ }
  throw Object.assign(new Error(message), { status: answer.status, headers: answer.headers });
};
export const askJson = async (path, options) => (await ask(path, options)).json();

const events = async function* (body, alive) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const [name, data] = text.slice(0, end).split("\ndata: ");
      yield [name.replace("event: ", ""), JSON.parse(data)];
    }
  }
};

const visible = () => (document.hidden
  ? new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true })).then(visible) : Promise.resolve());
const whenHidden = (act) => {
  let timer = null;
  const changed = () => { clearTimeout(timer); if (document.hidden) timer = setTimeout(act, HIDDEN_MS); };
  document.addEventListener("visibilitychange", changed);
  return () => { clearTimeout(timer); document.removeEventListener("visibilitychange", changed); };
};

/** Follows the stream for ever. `on`: {message(kind, document), state(live|lost, why), refused()}; it resolves when the
 * token is refused. A page that is hidden for a minute stops, and goes on when it is seen again. */
export const follow = async (on) => {
  for (let failures = 0; ; failures++) {
    await visible();
    const abort = new AbortController(), forget = whenHidden(() => abort.abort());
    let timer = setTimeout(() => abort.abort(), SILENCE_MS);
    const alive = () => { clearTimeout(timer); timer = setTimeout(() => abort.abort(), SILENCE_MS); };
    try {
      const answer = await ask("/admin/dashboard/stream", { signal: abort.signal });
      for await (const [kind, document] of events(answer.body, alive)) {
        failures = 0;
        on.state("live");
        on.message(kind, document);
      }
      on.state("lost", "the gateway ended the stream");
    } catch (error) {
      if (error.status === 401) return on.refused();
      on.state("lost", error.status ? error.message : "no connection");
    } finally {
      clearTimeout(timer);
      forget();
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
  }
};
