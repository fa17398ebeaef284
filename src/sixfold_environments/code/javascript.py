"""The harness of function tests in JavaScript, as `harness` is for Python."""

from __future__ import annotations

HARNESS = r"""
'use strict';
const fs = require('fs');
const vm = require('vm');
fs.unlinkSync(__filename);
const request = JSON.parse(fs.readFileSync(0, 'utf8'));
const stringify = JSON.stringify, parts = {left: 400000};
const write = (text) => {
  for (let data = Buffer.from(request.nonce + text + '\n'); data.length;) {
    try { data = data.subarray(fs.writeSync(3, data)); }
    catch (error) { if (error.code !== 'EAGAIN') throw error; }
  }
};
class NotPlain extends Error {}

function encode(value, depth) {
  if (depth > 64 || --parts.left < 0) throw new NotPlain('a value with too many parts or levels');
  if (value === null || value === undefined) return null;
  if (typeof value === 'boolean' || typeof value === 'string') return value;
  if (typeof value === 'bigint') {
    const digits = (value < 0n ? -value : value).toString(16);
    return {i: (value < 0n ? '-0x' : '0x') + digits};
  }
  if (typeof value === 'number') {
    if (Number.isSafeInteger(value)) return value;
    if (!Number.isFinite(value)) return {f: Number.isNaN(value) ? 'nan' : String(value)};
    if (Number.isInteger(value)) return encode(BigInt(value), depth);
    return {f: hex(value)};
  }
  if (Array.isArray(value)) return Array.from(value, (part) => encode(part, depth + 1));
  if (value instanceof Map) {
    return {d: [...value].map((pair) => pair.map((part) => encode(part, depth + 1)))};
  }
  if (value instanceof Set) return {s: [...value].map((part) => encode(part, depth + 1))};
  if (typeof value === 'object') {
    return {d: Object.entries(value).map(([k, v]) => [k, encode(v, depth + 1)])};
  }
  throw new NotPlain('a value of type ' + typeof value);
}

function hex(value) {  // as Python's float.hex
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, value);
  const bits = view.getBigUint64(0), mantissa = bits & 0xfffffffffffffn;
  const exponent = Number((bits >> 52n) & 0x7ffn);
  const lead = exponent ? '1' : '0', power = exponent ? exponent - 1023 : -1022;
  return (bits >> 63n ? '-0x' : '0x') + lead + '.' + mantissa.toString(16).padStart(13, '0')
    + 'p' + (power < 0 ? power : '+' + power);
}

function decode(data) {
  if (Array.isArray(data)) return data.map(decode);
  if (data === null || typeof data !== 'object') return data;
  const [[tag, body]] = Object.entries(data);
  if (tag === 'i') {
    return body.startsWith('-') ? -BigInt(body.slice(1)) : BigInt(body);
  }
  if (tag === 'f') return unhex(body);
  if (tag === 'd') return Object.fromEntries(body.map(([k, v]) => [decode(k), decode(v)]));
  if (tag === 't' || tag === 's' || tag === 'z') return body.map(decode);
  throw new Error('no such value in JavaScript: ' + tag);
}

function unhex(text) {
  const found = /^(-?)0x([01])\.?([0-9a-f]*)p([+-]\d+)$/.exec(text);
  if (!found) return text === 'nan' ? NaN : text === 'inf' ? Infinity : -Infinity;
  const fraction = found[3] ? parseInt(found[3], 16) / 16 ** found[3].length : 0;
  return (found[1] ? -1 : 1) * (Number(found[2]) + fraction) * 2 ** Number(found[4]);
}

const say = (error) => {
  try { return (error.name + ': ' + error.message).slice(0, 300); } catch { return 'an exception'; }
};
globalThis.require = require;
globalThis.module = {exports: {}};
try {
  vm.runInThisContext(request.code, {filename: 'solution.js'});
} catch (error) {
  write(stringify({failure: 'runtime_error', detail: say(error)}));
  process.exit(0);
}
const find = (name) => vm.runInThisContext(
  "typeof " + name + " !== 'undefined' ? " + name + " : module.exports." + name);
request.calls.forEach(([name, args, kwargs], number) => {
  try {
    const [method, owner] = name.split('.').reverse();
    const made = find(owner || 'Solution');
    const plain = owner && made ? undefined : find(method);
    const value = plain ? plain(...decode(args)) : new made()[method](...decode(args));
    parts.left = 400000;
    write(stringify({case: number, value: encode(value, 0)}));
  } catch (error) {
    const failure = error instanceof NotPlain ? 'protocol_error' : 'runtime_error';
    write(stringify({case: number, failure, detail: say(error)}));
  }
});
write(stringify({end: true}));
process.exit(0);
"""
