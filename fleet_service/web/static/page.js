// The page: signs in, follows the fleet, and tells its parts what is new.

import { $, announce, count, el, say } from './dom.js';
import { startExplain } from './explain.js';
import { Refused, call, setToken, signedIn, watch } from './net.js';
import { modelNames, startNodes, takeNodes } from './nodes.js';
import { startSessions, takeEvents } from './sessions.js';
import { refresh as refreshStory, startStory, touched } from './story.js';

const LONGEST_WAIT_MS = 5000;
const HIDDEN_MS = 10_000;
const THEME = 'fleet-theme';

let ending = null; // ends the stream that is open
let wait_ms = 0;
let first = true;

function theme() {
  const choice = $('theme');
  choice.value = localStorage.getItem(THEME) ?? '';
  const apply = () => {
    document.documentElement.dataset.theme = choice.value;
    localStorage.setItem(THEME, choice.value);
  };
  choice.addEventListener('change', apply);
  apply();
}

function live(words, tone) {
  if ($('live').textContent === words) return;
  say($('live'), words);
  $('live').dataset.tone = tone;
}

function trouble(error) {
  if (error instanceof Refused && error.status === 401) return signInAgain(error.message);
  if (!(error instanceof Refused)) return; // not reached: the stream says so, and goes on trying
  say($('trouble'), error.message);
  $('trouble').hidden = false;
  setTimeout(() => { $('trouble').hidden = true; }, 10_000);
}

function signInAgain(why) {
  setToken('');
  sessionStorage.setItem('fleet-sign-in', why);
  location.reload();
}

async function start() {
  theme();
  const { sign_in } = await (await fetch('page.json', { cache: 'no-store' })).json();
  $('sign-out').addEventListener('click', () => signInAgain('Signed out.'));
  $('sign-in').addEventListener('submit', (event) => {
    event.preventDefault();
    setToken($('token').value.trim());
    $('token').value = '';
    enter();
  });
  if (sign_in === 'token or certificate') say($('sign-in-hint'), 'Leave it empty to be known by your certificate.');
  if (sign_in === 'no' || signedIn()) await enter();
  else showSignIn(sessionStorage.getItem('fleet-sign-in'));
}

function showSignIn(why) {
  sessionStorage.removeItem('fleet-sign-in');
  live('signed out', 'idle');
  $('sign-in').hidden = false;
  $('fleet').hidden = $('sections').hidden = true;
  say($('trouble'), why ?? '');
  $('trouble').hidden = !why;
  $('token').focus();
}

async function enter() {
  let about;
  try {
    about = await call('GetAbout');
  } catch (error) {
    if (error instanceof Refused) {
      setToken('');
      return showSignIn(error.message);
    }
    live('not reached', 'bad');
    return setTimeout(enter, LONGEST_WAIT_MS);
  }
  $('sign-in').hidden = $('trouble').hidden = true;
  $('fleet').hidden = $('sections').hidden = false;
  $('sign-out').hidden = !signedIn();
  say($('head-id'), about.head_id);
  $('head-id').title = `fleet ${about.fleet_id}, policy ${about.policy}, version ${about.version}`;
  document.title = `Fleet ${about.head_id}`;
  say($('who'), about.caller ? `${about.caller}${about.may_operate ? '' : ', may look only'}` : '');
  startNodes(about.may_operate, trouble);
  startSessions(trouble);
  startStory();
  startExplain(modelNames);
  await call('ListEvents').then(takeEvents, trouble);
  follow();
}

async function follow() {
  let hidden = 0;
  document.addEventListener('visibilitychange', () => {
    clearTimeout(hidden);
    if (document.hidden) hidden = setTimeout(() => ending?.abort(), HIDDEN_MS);
  });
  for (;;) {
    if (document.hidden) await new Promise((seen) => document.addEventListener('visibilitychange', seen, { once: true }));
    ending = new AbortController();
    try {
      await watch('WatchFleet', take, ending.signal);
    } catch (error) {
      if (error instanceof Refused) trouble(error);
    }
    if (document.hidden) {
      live('paused', 'idle');
      continue;
    }
    live('connection lost, trying again', 'bad');
    wait_ms = Math.min(LONGEST_WAIT_MS, 2 * wait_ms + 250);
    await new Promise((done) => setTimeout(done, wait_ms));
  }
}

function take(message) {
  wait_ms = 0;
  live('live', 'good');
  takeNodes(message);
  touched(takeEvents(message));
  if (message.summary) counts(message.summary);
  if (message.snapshot && !first) refreshStory();
  first = false;
}

function counts(summary) {
  const all = {
    generating: summary.sessions_generating, waiting: summary.queued, bound: summary.sessions_bound,
    unbound: summary.sessions_unbound, parked: summary.sessions_parked, 'context tokens': summary.context_tokens,
  };
  $('counts').replaceChildren(...Object.entries(all).map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, count(value)))));
  const wrong = [
    summary.store_trouble && `Nothing can be kept on disk: ${summary.store_trouble}; new work is refused and streams wait.`,
    summary.stopping ? 'The head is shutting down.' : !summary.books_balance && 'The books do not balance: reservations differ from running and queued work.',
  ].filter(Boolean).join(' ');
  if (wrong && wrong !== $('counts').dataset.told) announce(wrong);
  $('counts').dataset.told = wrong;
  if (wrong) $('counts').append(el('div', { class: 'wrong' }, el('dt', {}, '!'), el('dd', {}, wrong)));
}

start();
