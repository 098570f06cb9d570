// As much of msgpack as headers have. Integers over 2^53 are BigInt.

export function encode(value) {
  if (value === null) return Buffer.from([0xc0]);
  if (value === true || value === false) return Buffer.from([value ? 0xc3 : 0xc2]);
  if (typeof value === "number" && !Number.isInteger(value)) return head(0xcb, 8, (b) => b.writeDoubleBE(value, 1));
  if (typeof value === "number" || typeof value === "bigint") {
    if (value >= 0 && value < 128) return Buffer.from([Number(value)]);
    return head(0xd3, 8, (b) => b.writeBigInt64BE(BigInt(value), 1));
  }
  if (typeof value === "string") {
    const text = Buffer.from(value);
    return Buffer.concat([head(0xdb, 4, (b) => b.writeUInt32BE(text.length, 1)), text]);
  }
  if (value instanceof Uint8Array) return Buffer.concat([head(0xc6, 4, (b) => b.writeUInt32BE(value.length, 1)), value]);
  const list = Array.isArray(value);
  const parts = list ? value.map(encode) : Object.entries(value).flat().map(encode);
  const count = list ? parts.length : parts.length / 2;
  return Buffer.concat([head(list ? 0xdd : 0xdf, 4, (b) => b.writeUInt32BE(count, 1)), ...parts]);
}

function head(first, bytes, write) {
  const made = Buffer.alloc(1 + bytes, first);
  write(made);
  return made;
}

export function decode(bytes) {
  let at = 0;
  const unsigned = (n) => {
    at += n;
    if (n < 8) return bytes.readUIntBE(at - n, n);
    return small(bytes.readBigUInt64BE(at - 8));
  };
  const signed = (n) => {
    at += n;
    return n < 8 ? bytes.readIntBE(at - n, n) : small(bytes.readBigInt64BE(at - 8));
  };
  const take = (n) => bytes.subarray(at, (at += n));
  const list = (n) => Array.from({ length: n }, value);
  const map = (n) => Object.fromEntries(Array.from({ length: n }, () => [value(), value()]));
  function value() {
    const b = bytes[at++];
    if (b < 0x80) return b;
    if (b < 0x90) return map(b & 15);
    if (b < 0xa0) return list(b & 15);
    if (b < 0xc0) return take(b & 31).toString();
    if (b >= 0xe0) return b - 256;
    if (b === 0xc0) return null;
    if (b === 0xc2 || b === 0xc3) return b === 0xc3;
    if (b >= 0xc4 && b <= 0xc6) return take(unsigned(1 << (b - 0xc4)));
    if (b === 0xca) return bytes.readFloatBE((at += 4) - 4);
    if (b === 0xcb) return bytes.readDoubleBE((at += 8) - 8);
    if (b >= 0xcc && b <= 0xcf) return unsigned(1 << (b - 0xcc));
    if (b >= 0xd0 && b <= 0xd3) return signed(1 << (b - 0xd0));
    if (b >= 0xd9 && b <= 0xdb) return take(unsigned(1 << (b - 0xd9))).toString();
    if (b === 0xdc || b === 0xdd) return list(unsigned(b === 0xdc ? 2 : 4));
    if (b === 0xde || b === 0xdf) return map(unsigned(b === 0xde ? 2 : 4));
    throw new Error(`msgpack: first byte ${b}`);
  }
  return value();
}

const small = (big) => (big <= Number.MAX_SAFE_INTEGER && big >= Number.MIN_SAFE_INTEGER ? Number(big) : big);
