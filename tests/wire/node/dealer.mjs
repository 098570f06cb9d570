// A ZeroMQ DEALER without encryption, by ZMTP 3.1 (https://rfc.zeromq.org/spec/23/), over ipc or TCP: one connection.
import net from "node:net";

const MORE = 1, LONG = 2, COMMAND = 4;

function greeting() {
  const made = Buffer.alloc(64);
  made[0] = 0xff;
  made[9] = 0x7f;
  made[10] = 3;
  made[11] = 1;
  made.write("NULL", 12);
  return made;
}

function frame(flags, body) {
  if (body.length < 256) return Buffer.concat([Buffer.from([flags, body.length]), body]);
  const head = Buffer.alloc(9, flags | LONG);
  head.writeBigUInt64BE(BigInt(body.length), 1);
  return Buffer.concat([head, body]);
}

function property(name, text) {
  const head = Buffer.from([name.length, ...Buffer.from(name), 0, 0, 0, text.length]);
  return Buffer.concat([head, Buffer.from(text)]);
}

export class Dealer {
  // `opened()`: messages can be sent. `heard(frames)`: a message. `closed()`: the connection is gone.
  constructor(address, { opened, heard, closed }) {
    const path = address.startsWith("ipc://") ? { path: address.slice(6) } : host(address);
    this.unread = Buffer.alloc(0);
    this.greeted = false;
    this.frames = [];
    this.on = { opened, heard };
    this.socket = net.connect(path, () => this.socket.write(greeting()));
    this.socket.on("data", (more) => this.read(more));
    this.socket.on("error", () => {}); // "close" follows
    this.socket.on("close", closed);
  }

  send(frames) {
    frames.forEach((body, i) => this.socket.write(frame(i < frames.length - 1 ? MORE : 0, body)));
  }

  close() {
    this.socket.end();
  }

  read(more) {
    this.unread = Buffer.concat([this.unread, more]);
    if (!this.greeted) {
      if (this.unread.length < 64) return;
      this.unread = this.unread.subarray(64);
      this.greeted = true;
      const ready = Buffer.concat([Buffer.from("\x05READY"), property("Socket-Type", "DEALER"), property("Identity", "")]);
      this.socket.write(frame(COMMAND, ready));
    }
    for (;;) {
      const long = this.unread[0] & LONG;
      const head = long ? 9 : 2;
      if (this.unread.length < head) return;
      const size = long ? Number(this.unread.readBigUInt64BE(1)) : this.unread[1];
      if (this.unread.length < head + size) return;
      const flags = this.unread[0];
      const body = this.unread.subarray(head, head + size);
      this.unread = this.unread.subarray(head + size);
      if (flags & COMMAND) this.command(body);
      else {
        this.frames.push(body);
        if (!(flags & MORE)) this.on.heard(this.frames.splice(0));
      }
    }
  }

  command(body) {
    const name = body.subarray(1, 1 + body[0]).toString();
    if (name === "READY") this.on.opened();
    if (name === "PING") this.socket.write(frame(COMMAND, Buffer.concat([Buffer.from("\x04PONG"), body.subarray(7)])));
    if (name === "ERROR") this.socket.destroy();
  }
}

function host(address) {
  const { hostname, port } = new URL(address);
  return { host: hostname, port: Number(port) };
}
