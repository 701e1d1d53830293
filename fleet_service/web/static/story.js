// A session's story: what became of its generations, drawn to scale and told in words.

import { $, clock, count, duration, el, lower, num, plural, say } from './dom.js';
import { call } from './net.js';
import { movedWords } from './sessions.js';

const QUIET_MS = 150;
const COLORS = 6;

let shown = null; // {session_id} or {generation_id}
let timer = 0;
let ahead_ms = 0; // the head's clock before ours
let running = [];
let closed = new Set();

export const now_ms = () => Date.now() + ahead_ms;

/** Show the story that the address names; a section's name leaves it as it is, anything else closes it. */
async function followAddress() {
  const address = new URLSearchParams(location.hash.slice(1));
  if (['nodes', 'sessions', 'placement'].some((section) => address.has(section))) return;
  const session_id = address.get('session'), generation_id = address.get('generation');
  shown = session_id ? { session_id } : generation_id ? { generation_id } : null;
  $('story').hidden = !shown;
  running = [];
  closed = new Set();
  if (!shown) return;
  say($('story-title'), `Story of ${Object.values(shown)[0]}`);
  $('story-body').replaceChildren();
  await refresh();
  $('story-title').focus();
}

/** Something became of these sessions or generations. */
export function touched(ids) {
  if (shown && !timer && Object.values(shown).some((id) => ids.has(id))) timer = setTimeout(refresh, QUIET_MS);
}

export function startStory() {
  addEventListener('hashchange', followAddress);
  setInterval(() => running.forEach((draw) => draw()), 500);
  followAddress();
}

export async function refresh() {
  clearTimeout(timer);
  timer = 0;
  const mine = shown;
  if (!mine) return;
  let reply;
  try {
    reply = await call('GetStory', mine);
  } catch (error) {
    if (mine === shown) $('story-body').replaceChildren(el('p', { class: 'note' }, error.message));
    return;
  }
  if (mine !== shown) return;
  ahead_ms = reply.now_ms - Date.now();
  running = [];
  const told = reply.generations.toReversed().map((each, at) => generation(each, at === 0));
  const none = el('p', { class: 'hint' }, 'No generation of it is remembered: it had none, or they were too long ago.');
  const more = reply.left_out ? el('p', { class: 'hint' }, `${plural(reply.left_out, 'older generation')} left out.`) : null;
  $('story-body').replaceChildren(...(told.length ? told : [none]), ...(more ? [more] : []));
}

function generation(story, first) {
  const end = story.turns.find((turn) => turn.finished);
  const moves = story.turns.filter((turn) => turn.moved).length;
  const state = end ? lower(end.finished.reason, 'FINISH_REASON_') : 'running';
  const tokens = end ? `, ${plural(end.finished.output_tokens, 'token')}` : '';
  const track = el('div', { class: 'track', 'aria-hidden': 'true' });
  const axis = el('p', { class: 'axis', 'aria-hidden': 'true' }, el('span', {}, '0'), el('span'));
  const draw = () => drawTrack(track, axis, story, end ? end.at_ms : now_ms());
  draw();
  if (!end) running.push(draw);
  const id = story.generation_id;
  const turns = endLast(story.turns);
  return el('details', { open: first && !closed.has(id), ontoggle: (event) => (event.target.open ? closed.delete(id) : closed.add(id)) },
    el('summary', {}, el('strong', {}, id), ` ${state}${tokens}, ${plural(moves, 'move')} `, el('span', { class: 'hint' },
      `${clock(story.accepted_ms)} · ${story.model} · ${story.owner ? `${story.owner} · ` : ''}context ${count(story.context_tokens)} · at most ${count(story.max_new_tokens)} tokens`)),
    track, axis,
    el('ol', { class: 'turns' }, ...turns.flatMap((turn, at) => [
      turn.failed && turns[at - 1]?.left?.failure === turn.failed.kind ? null // that has been said
        : el('li', { class: turn.moved ? 'moved' : '' }, el('time', {}, `+${duration(turn.at_ms - story.accepted_ms)}`), el('span', {}, ...turnWords(turn))),
      at === 0 && story.left_out ? el('li', { class: 'hint' }, `${plural(story.left_out, 'turn')} left out`) : null,
    ].filter(Boolean))));
}

/** The end is decided before its attempt is over, and yet told last. */
const endLast = (turns) => [...turns.filter((turn) => !turn.finished), ...turns.filter((turn) => turn.finished)];

/** Where it was and when: [from, to, kind, label], waits and gaps included. */
export function segments(story, end_ms) {
  const parts = [];
  let open = null;
  let waits = story.accepted_ms;
  const close = (at) => {
    if (open) parts.push([open.from, at, 'run', open.node]);
    open = null;
  };
  for (const { at_ms, tried, left, moved, finished } of story.turns) {
    if (tried) {
      if (waits !== null) parts.push([waits, at_ms, 'wait', 'waits']);
      close(at_ms);
      waits = null;
      open = { node: tried.node, from: at_ms };
    } else if (moved) {
      const gap = at_ms - num(moved.gap_ms);
      for (const part of parts) if (part[1] > gap) part[1] = Math.max(part[0], gap);
      parts.push([gap, at_ms, 'gap', `gap ${duration(num(moved.gap_ms))}`]);
      if (open) open.from = at_ms;
    } else if (left) {
      close(at_ms);
      waits = left.failure ? at_ms : null;
    } else if (finished) {
      close(at_ms);
      waits = null;
    }
  }
  close(end_ms);
  if (waits !== null && end_ms > waits) parts.push([waits, end_ms, 'wait', 'waits']);
  return parts.filter(([from, to]) => to > from);
}

function drawTrack(track, axis, story, end_ms) {
  const from = story.accepted_ms, whole = Math.max(1, end_ms - from);
  const nodes = [];
  track.replaceChildren(...segments(story, end_ms).map(([start, end, kind, label]) => {
    const part = el('span', { class: kind, title: `${label}: ${duration(end - start)}` }, el('i', {}, label));
    part.style.left = `${((start - from) / whole) * 100}%`;
    part.style.width = `${((end - start) / whole) * 100}%`;
    if (kind === 'run') {
      if (!nodes.includes(label)) nodes.push(label);
      part.dataset.color = nodes.indexOf(label) % COLORS;
    }
    return part;
  }));
  say(axis.lastElementChild, duration(whole));
}

function turnWords({ placed, waited, tried, first_token, left, failed, moved, finished }) {
  if (placed) return [`placed on ${placed.node}`, ...why(placed)];
  if (waited) return [`waited ${duration(waited.ms)} for a lane`];
  if (tried) return [`attempt ${tried.number} goes to ${tried.node}, from token ${count(tried.next_index)}`];
  if (first_token) return ['first token'];
  if (left) return [`attempt ${left.number} on ${left.node} over: ${plural(left.tokens, 'token')}${left.failure ? `, failed: ${lower(left.failure)}` : ''}`];
  if (failed) return [`failed: ${lower(failed.kind)}`];
  if (moved) return [movedWords(moved)];
  const { reason, output_tokens, attempts, timings = {}, error } = finished;
  return [`finished: ${lower(reason, 'FINISH_REASON_')}, ${plural(output_tokens, 'token')}, ${plural(attempts, 'attempt')}, longest gap ${duration(num(timings.longest_gap_ms))}`,
    error ? ` – ${error.reason}: ${error.message}` : ''];
}

function why({ node, verdicts }) {
  if (!verdicts.length) return [];
  const words = verdicts.filter((verdict) => verdict.eligible).map((verdict) => {
    const terms = [verdict.eta_ms === undefined ? null : `estimate ${duration(num(verdict.eta_ms))}`, `${count(verdict.ahead)} ahead`];
    return `${verdict.node === node ? '' : `${verdict.node} `}${terms.filter(Boolean).join(', ')}`;
  });
  return [el('span', { class: 'hint' }, ` – ${words.join('; then ')}`)];
}
