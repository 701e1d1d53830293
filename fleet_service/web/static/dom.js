// Elements and words. Text is only ever set as text.

const SVG = 'http://www.w3.org/2000/svg';

export const $ = (id) => document.getElementById(id);

/** An element. `set`: attributes; `on...` are listeners, true and false set or leave out. */
export function el(tag, set = {}, ...children) {
  const svg = tag === 'svg' || tag === 'polyline';
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(set)) {
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, '');
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

/** Change a text only when it is another: screen readers and selections stay undisturbed. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function announce(text) {
  $('said').textContent = text;
}

/** Make the children of `parent` those that `make` and `update` give for `items`, keeping what is there. */
export function keyed(parent, kept, items, key, make, update) {
  const wanted = new Set(items.map(key));
  for (const [name, part] of kept) {
    if (!wanted.has(name)) {
      part.root.remove();
      kept.delete(name);
    }
  }
  let before = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    if (!kept.has(name)) kept.set(name, make(item));
    const part = kept.get(name);
    update(part, item);
    if (part.root === before) before = before.nextElementSibling;
    else parent.insertBefore(part.root, before);
  }
}

/** A bar with its words: the picture is for the eye, the words are for all. */
export function meter(label) {
  const fill = el('i'), words = el('span', { class: 'value' });
  const root = el('div', { class: 'meter' }, el('span', {}, label), el('b', { 'aria-hidden': 'true' }, fill), words);
  return { root, set(part, text, tone = '') {
    fill.style.width = `${Math.min(100, Math.max(0, part * 100))}%`;
    fill.dataset.tone = tone;
    say(words, text);
  } };
}

// Protobuf's JSON leaves out what is 0 and writes long numbers as texts.
export const num = (value) => Number(value ?? 0);
export const count = (value) => num(value).toLocaleString('en');
export const plural = (n, word) => `${count(n)} ${word}${num(n) === 1 ? '' : 's'}`;
export const lower = (text, prefix = '') => (text ?? '').replace(prefix, '').toLowerCase().replaceAll('_', ' ');

export function duration(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  if (ms < 3_600_000) return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
  return `${Math.floor(ms / 3_600_000)} h ${Math.round((ms % 3_600_000) / 60_000)} min`;
}

export const clock = (ms) => new Date(ms).toLocaleTimeString('en-GB');
export const sessionLink = (id) => el('a', { href: `#session=${encodeURIComponent(id)}` }, id);
