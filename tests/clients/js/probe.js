// A gRPC client on @grpc/grpc-js, driven over standard input and output: one JSON object a line.
// argv[2]: {"address", "options", "tls": {"authority", "certificate", "key"}}; messages are base64.
"use strict";

const fs = require("fs");
const readline = require("readline");
const grpc = require("@grpc/grpc-js");

const where = JSON.parse(process.argv[2]);
const read = (path) => (path ? fs.readFileSync(path) : null);
const credentials = where.tls
  ? grpc.credentials.createSsl(read(where.tls.authority), read(where.tls.key), read(where.tls.certificate))
  : grpc.credentials.createInsecure();
const client = new grpc.Client(where.address, credentials, where.options);
const same = (bytes) => bytes;
const calls = new Map();

const say = (id, event) => process.stdout.write(JSON.stringify({ id, ...event }) + "\n");
const ended = (id, status) => {
  calls.delete(id);
  say(id, { event: "end", code: status.code, message: status.details });
};

function start({ id, kind, path, request, metadata, timeout, wait }) {
  const fields = new grpc.Metadata({ waitForReady: wait });
  for (const [name, value, binary] of metadata) fields.add(name, binary ? Buffer.from(value, "base64") : value);
  const options = timeout === null ? {} : { deadline: Date.now() + timeout };
  const body = Buffer.from(request, "base64");
  if (kind === "unary") {
    const call = client.makeUnaryRequest(path, same, same, body, fields, options, (error, reply) => {
      if (reply) say(id, { event: "message", data: reply.toString("base64") });
    });
    call.on("status", (status) => ended(id, status));
    calls.set(id, call);
    return;
  }
  const call = client.makeServerStreamRequest(path, same, same, body, fields, options);
  call.on("data", (reply) => say(id, { event: "message", data: reply.toString("base64") }));
  call.on("error", () => {});
  call.on("status", (status) => ended(id, status));
  calls.set(id, call);
}

readline
  .createInterface({ input: process.stdin })
  .on("line", (line) => {
    const order = JSON.parse(line);
    if (order.order === "cancel") calls.get(order.id)?.cancel();
    else start(order);
  })
  .on("close", () => {
    client.close();
    process.exit(0);
  });
