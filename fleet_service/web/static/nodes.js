// The nodes: a card each, changed in place as news come in.

import { $, announce, count, duration, el, keyed, lower, meter, num, plural, say } from './dom.js';
import { call } from './net.js';

const SHOWN = 300;
const SAMPLES = 60;
const STATES = {
  NODE_STATE_UP: ['●', 'up', 'good'],
  NODE_STATE_SUSPECT: ['▲', 'suspect', 'warn'],
  NODE_STATE_DOWN: ['✕', 'down', 'bad'],
  NODE_STATE_CONNECTING: ['…', 'connecting', 'idle'],
};
const DRAINS = { DRAIN_STATE_DRAINING: 'draining', DRAIN_STATE_DRAINED: 'drained' };

const nodes = new Map();
const cards = new Map();
const seen = new Map(); // name -> how many ran, once a second
let mayOperate = false;
let failed = () => {};

export const modelNames = () => [...new Set([...nodes.values()].flatMap((node) => (node.models ?? []).map((m) => m.name)))].sort();

export function startNodes(operate, onError) {
  mayOperate = operate;
  failed = onError;
  $('node-filter').addEventListener('input', draw);
  $('ask-no').addEventListener('click', () => $('ask').close('no'));
  setInterval(sample, 1000);
}

export function takeNodes(message) {
  const before = new Map([...nodes].map(([name, node]) => [name, node.state]));
  if (message.snapshot) nodes.clear();
  for (const name of message.removed_nodes ?? []) nodes.delete(name);
  for (const node of message.nodes ?? []) {
    nodes.set(node.name, node);
    const was = before.get(node.name);
    if (was && was !== node.state) announce(`Node ${node.name} is ${stateOf(node)[1]}. ${node.state_detail ?? ''}`);
  }
  if (message.snapshot || message.nodes || message.removed_nodes) draw();
}

const stateOf = (node) => STATES[node.state] ?? ['?', lower(node.state), 'idle'];
/** draining or drained, of a node that is. */
export const drainWord = (name) => (nodes.has(name) ? drainOf(nodes.get(name)) : undefined);
const drainOf = (node) => (node.drain ? DRAINS[node.drain.state] : undefined);

function words(node) {
  const labels = Object.entries(node.labels ?? {}).map(([key, value]) => `${key}=${value}`);
  const models = (node.models ?? []).map((model) => model.name);
  return [node.name, stateOf(node)[1], node.cordoned ? 'cordoned' : '', drainOf(node) ?? '', ...labels, ...models].join(' ').toLowerCase();
}

function draw() {
  const wanted = $('node-filter').value.trim().toLowerCase().split(/[\s,]+/);
  const all = [...nodes.values()].sort((a, b) => a.name.localeCompare(b.name, 'en', { numeric: true }));
  const found = all.filter((node) => wanted.every((word) => words(node).includes(word)));
  const up = all.filter((node) => node.state === 'NODE_STATE_UP').length;
  say($('node-count'), `${up} of ${all.length} up`);
  keyed($('node-list'), cards, found.slice(0, SHOWN), (node) => node.name, makeCard, updateCard);
  const hidden = found.length - SHOWN;
  $('no-nodes').hidden = found.length > 0 && hidden <= 0;
  say($('no-nodes'), hidden > 0 ? `${hidden} more; filter to see them.` : all.length ? 'No node is like that.' : 'The head has no nodes.');
  names('node-names', all.map((node) => node.name));
  names('model-names', modelNames());
}

function names(list, values) {
  const text = values.slice(0, SHOWN).join('\n');
  if ($(list).dataset.values === text) return;
  $(list).dataset.values = text;
  $(list).replaceChildren(...values.slice(0, SHOWN).map((value) => el('option', { value })));
}

function orderOf(node) {
  const { note, by } = node.drain ?? { note: node.cordon_note, by: node.cordoned_by };
  if (!node.cordoned || !note) return '';
  return `${node.drain ? 'Drained' : 'Cordoned'}${by ? ` by ${by}` : ''}: ${note}`;
}

/** Whether no other node is left for new work. */
function isLast(node) {
  const takes = [...nodes.values()].filter((each) => each.state === 'NODE_STATE_UP' && !each.cordoned);
  return takes.length === 1 && takes[0].name === node.name;
}

function makeCard(node) {
  const card = {
    state: el('span', { class: 'badge' }), kept: el('span', { class: 'badge', 'data-tone': 'warn' }),
    detail: el('p', { class: 'detail' }), drain: el('p', { class: 'detail' }), facts: el('p', { class: 'facts' }),
    lanes: meter('Lanes'), queue: meter('Queue'), kv: meter('KV cache'),
    line: el('polyline'), cordon: el('button', { type: 'button' }), leave: el('button', { type: 'button' }, 'Drain'),
  };
  const spark = el('svg', { class: 'spark', viewBox: `0 0 ${SAMPLES - 1} 20`, preserveAspectRatio: 'none', role: 'img', 'aria-label': 'Generations running, last minute' }, card.line);
  const title = el('h3', {}, node.name);
  card.cordon.addEventListener('click', () => (card.node.cordoned ? uncordon(card.node) : ask('Cordon', card.node)));
  card.leave.addEventListener('click', () => ask('Drain', card.node));
  card.root = el('li', { class: 'card', 'data-node': node.name },
    el('div', { class: 'bar' }, title, el('span', {}, card.state, ' ', card.kept)),
    card.detail, card.lanes.root, card.queue.root, card.kv.root, spark, card.drain, card.facts,
    el('div', { class: 'bar actions' }, card.cordon, card.leave));
  return card;
}

function updateCard(card, node) {
  card.node = node;
  const [sign, word, tone] = stateOf(node);
  const report = node.report ?? {};
  const drain = drainOf(node);
  say(card.state, `${sign} ${word}`);
  card.state.dataset.tone = tone;
  card.root.dataset.tone = tone;
  say(card.kept, drain ?? (node.cordoned ? 'cordoned' : node.unlisted ? 'unlisted' : ''));
  card.kept.hidden = !card.kept.textContent;
  const why = [node.state_detail, orderOf(node), node.reports_stale && 'Its reports are stale.'];
  say(card.detail, why.filter(Boolean).join(' '));
  const running = num(node.running), lanes = num(node.lanes), queued = num(node.queued);
  card.lanes.set(lanes ? running / lanes : 0, `${running} of ${lanes}`, running >= lanes && lanes ? 'warn' : '');
  card.queue.set(queued / Math.max(8, lanes), queued ? `${queued} waiting` : 'empty', queued ? 'warn' : '');
  const used = num(report.kv_blocks_used), total = num(report.kv_blocks_total);
  card.kv.set(total ? used / total : 0, total ? `${Math.floor((used * 100) / total)} %` : 'not told', total && used / total >= 0.9 ? 'bad' : '');
  say(card.drain, drain === 'draining' ? `Draining: ${plural(node.drain.sessions, 'session')} left, ${count(node.drain.waiting)} wait for a lane elsewhere, ${count(node.drain.staying)} stay to their end, ${plural(node.drain.owed, 'revoke')} owed.`
    : drain === 'drained' ? `Drained: it can be stopped. ${count(node.drain.moved)} moved, ${count(node.drain.unbound)} were unbound.` : '');
  say(card.facts, factsOf(node, report).join(' · '));
  say(card.cordon, node.cordoned ? 'Uncordon' : 'Cordon');
  card.leave.disabled = !mayOperate || Boolean(drain);
  card.cordon.disabled = !mayOperate;
  card.cordon.title = card.leave.title = mayOperate ? '' : 'This needs the permission operate.';
  card.cordon.setAttribute('aria-label', `${card.cordon.textContent} ${node.name}`);
  card.leave.setAttribute('aria-label', `Drain ${node.name}`);
}

function factsOf(node, report) {
  const failures = Object.entries(node.failures ?? {}).map(([kind, n]) => `${lower(kind)} ${n}`);
  return [
    plural(node.sessions, 'session'),
    (node.models ?? []).map((model) => model.name).join(', ') || 'no model',
    num(report.decode_tokens_per_s) ? `${count(report.decode_tokens_per_s)} tokens/s when busy` : null,
    node.address,
    node.state === 'NODE_STATE_DOWN' && node.last_seen_time ? `seen ${duration(Date.now() - Date.parse(node.last_seen_time))} ago` : null,
    num(node.outbox) ? `${plural(node.outbox, 'revoke')} owed` : null,
    failures.length ? `failures: ${failures.join(', ')}` : null,
    node.encrypted ? 'TLS' : null,
  ].filter(Boolean);
}

function sample() {
  for (const name of seen.keys()) if (!nodes.has(name)) seen.delete(name);
  for (const [name, node] of nodes) {
    const line = seen.get(name) ?? [];
    line.push(node.state === 'NODE_STATE_UP' ? num(node.running) + num(node.queued) : 0);
    seen.set(name, line.slice(-SAMPLES));
    const most = Math.max(num(node.lanes), 1, ...line);
    const points = line.map((value, at) => `${at + SAMPLES - line.length},${19 - (value / most) * 18}`);
    cards.get(name)?.line.setAttribute('points', points.join(' '));
  }
}

async function uncordon(node) {
  await change('UncordonNode', { node: node.name }, `${node.name} takes new work again.`);
}

function ask(what, node) {
  const dialog = $('ask');
  say($('ask-title'), `${what} ${node.name}`);
  const last = isLast(node) ? ' It is the last node that takes new work: until another does, callers are refused.' : '';
  say($('ask-text'), (what === 'Cordon' ? 'No new work is placed on it; what it runs goes on.' : 'No new work is placed on it, and what it runs goes on elsewhere.') + last);
  say($('ask-yes'), what);
  $('ask-note').value = '';
  dialog.returnValue = 'no';
  dialog.onclose = () => {
    if (dialog.returnValue !== 'yes') return;
    const done = what === 'Cordon' ? `${node.name} is cordoned.` : `${node.name} is being drained.`;
    change(`${what}Node`, { node: node.name, note: $('ask-note').value }, done);
  };
  dialog.showModal();
  $('ask-note').focus();
}

async function change(method, body, done) {
  try {
    const reply = await call(method, body);
    if (reply.node?.name) takeNodes({ nodes: [reply.node] });
    announce(done);
  } catch (error) {
    failed(error);
  }
}
