// The sessions last used, and what lately became of generations.

import { $, clock, count, duration, el, keyed, lower, num, say, sessionLink } from './dom.js';
import { call } from './net.js';

const EVENTS = 60;
const QUIET_MS = 700;
const EVERY_MS = 4000;

const rows = new Map();
let timer = 0;
let asked = 0;
let failed = () => {};

export function startSessions(onError) {
  failed = onError;
  const form = $('session-filter');
  form.addEventListener('input', () => soon(150));
  form.addEventListener('submit', (event) => event.preventDefault());
  $('moves-only').addEventListener('change', () => $('event-list').classList.toggle('moves-only', $('moves-only').checked));
  setInterval(() => document.hidden || soon(0), EVERY_MS);
  refresh();
}

function soon(wait_ms) {
  if (timer && wait_ms >= QUIET_MS) return;
  clearTimeout(timer);
  timer = setTimeout(refresh, wait_ms);
}

async function refresh() {
  clearTimeout(timer);
  timer = 0;
  const form = new FormData($('session-filter'));
  const mine = ++asked;
  try {
    const reply = await call('ListSessions', { text: form.get('text'), state: form.get('state'), node: form.get('node') });
    if (mine === asked) draw(reply);
  } catch (error) {
    failed(error);
  }
}

function draw({ sessions, now_ms }) {
  keyed($('session-rows'), rows, sessions, (session) => session.session_id, makeRow, (row, session) => {
    say(row.state, lower(session.state, 'SESSION_STATE_'));
    row.state.dataset.tone = { SESSION_STATE_GENERATING: 'good', SESSION_STATE_PARKED: 'warn' }[session.state] ?? 'idle';
    say(row.node, session.node || '–');
    say(row.context, count(session.context_length));
    say(row.used, session.generation_id ? 'now' : `${duration(Math.max(0, now_ms - Date.parse(session.last_use_time)))} ago`);
  });
  $('no-sessions').hidden = sessions.length > 0;
  say($('no-sessions'), 'There is no such session.');
  say($('session-count'), sessions.length >= 100 ? 'the last 100 used' : String(sessions.length));
}

function makeRow(session) {
  const row = { state: el('span', { class: 'badge' }), node: el('td'), context: el('td', { class: 'number' }), used: el('td', { class: 'wide number' }) };
  row.root = el('tr', {}, el('th', { scope: 'row' }, sessionLink(session.session_id)), el('td', {}, row.state), row.node, row.context,
    el('td', { class: 'wide' }, session.spec?.model ?? ''), el('td', { class: 'wide' }, session.owner || '–'), row.used);
  return row;
}

/** Show the events of a message; returns the sessions they are of. */
export function takeEvents(message) {
  const list = $('event-list');
  const events = message.events ?? [];
  for (const event of events) {
    const moved = event.moved ? 'moved' : '';
    list.prepend(el('li', { class: moved, 'data-kind': moved || (event.ended ? 'ended' : 'placed') },
      el('time', {}, clock(Date.parse(event.time))), ' ', storyLink(event), ' ', eventWords(event)));
  }
  if (num(message.skipped_events)) list.prepend(el('li', {}, `${count(message.skipped_events)} more, not shown`));
  while (list.children.length > EVENTS) list.lastElementChild.remove();
  $('no-events').hidden = list.children.length > 0;
  if (events.length || message.summary) soon(QUIET_MS);
  return new Set(events.flatMap((event) => [event.session_id, event.generation_id]));
}

const storyLink = (event) => (event.session_id ? sessionLink(event.session_id)
  : el('a', { href: `#generation=${encodeURIComponent(event.generation_id)}` }, event.generation_id));

function eventWords({ placed, moved, ended }) {
  if (placed) return `placed on ${placed.node}`;
  if (moved) return movedWords(moved);
  return `ended${ended.node ? ` on ${ended.node}` : ''}: ${lower(ended.finished?.reason, 'FINISH_REASON_')}, ${count(ended.finished?.output_tokens)} tokens`;
}

export const movedWords = (moved) => (moved.from_node === moved.to_node ? `begun anew on ${moved.to_node}` : `moved from ${moved.from_node} to ${moved.to_node}`)
  + ` at token ${count(moved.next_index)}: ${lower(moved.cause, 'MOVE_CAUSE_')}, gap ${duration(num(moved.gap_ms))}`;
