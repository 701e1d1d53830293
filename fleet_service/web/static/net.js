// Calls to the head: JSON there and back, and the one stream of what changes.

const SILENCE_MS = 25_000;
const KEY = 'fleet-access-token';
let token = sessionStorage.getItem(KEY) ?? '';

export const signedIn = () => token !== '';

export function setToken(value) {
  token = value;
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

export class Refused extends Error {
  constructor(status, reason, message) {
    super(message);
    this.status = status;
    this.reason = reason;
  }
}

async function post(method, body, signal) {
  const headers = { 'Content-Type': 'application/json' };
  if (token) headers.Authorization = `Bearer ${token}`;
  const answer = await fetch(`api/${method}`, {
    method: 'POST', headers, body: JSON.stringify(body), signal, cache: 'no-store', redirect: 'error',
  });
  if (answer.ok) return answer;
  const text = await answer.text();
  let error = {};
  try {
    error = JSON.parse(text).error;
  } catch { /* a plain text says it */ }
  throw new Refused(answer.status, error.reason ?? '', error.message ?? text.trim());
}

export async function call(method, body = {}) {
  return (await post(method, body)).json();
}

/** Calls `each` with every message until the stream ends, or `signal` ends it; throws when it breaks. */
export async function watch(method, each, signal) {
  const answer = await post(method, {}, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const silent = setTimeout(() => reader.cancel(), SILENCE_MS); // the head sends something every 10 s
    const { done, value } = await reader.read().finally(() => clearTimeout(silent));
    if (done) return;
    const events = (rest + value).split('\n\n');
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith('data: ')) continue;
      const message = JSON.parse(event.slice(6));
      if (message.error) throw new Refused(0, message.error.reason, message.error.message);
      each(message);
    }
  }
}
