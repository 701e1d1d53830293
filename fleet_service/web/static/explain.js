// How something would be placed now: every node's terms, or why it was left out.

import { $, count, duration, el, lower, num } from './dom.js';
import { call } from './net.js';
import { drainWord } from './nodes.js';

export function startExplain(models) {
  const form = $('explain');
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    const given = new FormData(form);
    const model = given.get('model') || (given.get('session') ? '' : models()[0] ?? '');
    form.elements.model.value = model;
    try {
      const reply = await call('ExplainPlacement', request(given, model));
      $('explained').replaceChildren(...answer(reply));
    } catch (error) {
      $('explained').replaceChildren(el('p', { class: 'note' }, error.message));
    }
  });
}

function request(given, model) {
  if (given.get('session')) return { session_id: given.get('session').trim() };
  const labels = given.get('labels').split(',').map((pair) => pair.trim().split(/=(.*)/s)).filter(([key]) => key);
  return {
    prompt_tokens: num(given.get('prompt')),
    spec: { model, expected_output_tokens: num(given.get('output')), node_selector: Object.fromEntries(labels.map(([key, value]) => [key, value ?? ''])) },
  };
}

function answer({ policy, chosen, refusal_reason, refusal_message, verdicts = [] }) {
  const longest = Math.max(1, ...verdicts.filter((each) => each.eligible).map((each) => num(each.eta_ms)));
  const head = ['Node', 'Verdict', 'Estimate', 'Ahead', 'Decode/s', 'Prefill/s', 'KV', 'Sessions'];
  return [
    el('p', {}, chosen ? 'It would go to ' : 'No node could take it: ', el('strong', {}, chosen || `${refusal_reason}: ${refusal_message}`), chosen ? `, by the policy ${policy}.` : ''),
    el('div', { class: 'scroll', role: 'region', 'aria-label': 'Verdicts', tabindex: 0 }, el('table', {},
      el('thead', {}, el('tr', {}, ...head.map((name, at) => el('th', { scope: 'col', class: at > 2 ? 'number' : '' }, name)))),
      el('tbody', {}, ...verdicts.map((each) => row(each, chosen, longest))))),
    verdicts.some((each) => !each.decode_reported || !each.prefill_reported) ? el('p', { class: 'hint' }, '~ stands for a rate that the node has not reported yet.') : '',
  ];
}

/** A drain keeps work off as a cordon does, and is told as what it is. */
const leftOut = ({ node, left_out }) => (left_out === 'cordoned' && drainWord(node)) || lower(left_out);

function row(verdict, chosen, longest) {
  const bar = el('i');
  bar.style.width = `${(num(verdict.eta_ms) / longest) * 100}%`;
  const word = verdict.node === chosen ? 'chosen' : verdict.eligible ? 'could take it' : `left out: ${leftOut(verdict)}`;
  const number = (value, stands) => el('td', { class: 'number' }, `${stands ? '~' : ''}${count(value)}`);
  return el('tr', {},
    el('th', { scope: 'row' }, verdict.node),
    el('td', {}, el('span', { class: 'badge', 'data-tone': verdict.node === chosen ? 'good' : verdict.eligible ? 'idle' : 'warn' }, word)),
    el('td', { class: 'estimate' }, ...(verdict.eligible && verdict.eta_ms !== undefined ? [el('b', { 'aria-hidden': 'true' }, bar), duration(num(verdict.eta_ms))] : ['–'])),
    number(verdict.ahead), number(verdict.decode_tokens_per_s, !verdict.decode_reported), number(verdict.prefill_tokens_per_s, !verdict.prefill_reported),
    el('td', { class: 'number' }, verdict.kv_used_pct === undefined ? '–' : `${verdict.kv_used_pct} %`), number(verdict.sessions));
}
