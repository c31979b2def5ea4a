// Calls the gateway with the npm package openai, and prints what it got as JSON.
// node openai_client.mjs BASE_URL STOP
import OpenAI from "openai";

const [baseURL, stop] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const chat = { model: "small", messages: [{ role: "user", content: "Hi" }] };
const greedy = { temperature: 0, max_tokens: 24 };
const found = {};

found.whole = await client.chat.completions.create({ ...chat, ...greedy });
found.pieces = [];
const stream = await client.chat.completions.create({
  ...chat,
  ...greedy,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const piece of stream) found.pieces.push(piece);

const text = { model: "small", prompt: "def f(", ...greedy };
found.completion = await client.completions.create(text);
found.completionPieces = [];
for await (const piece of await client.completions.create({ ...text, stream: true }))
  found.completionPieces.push(piece);

found.stopped = await client.chat.completions.create({ ...chat, ...greedy, stop: [stop] });
const sampled = { temperature: 1.1, max_tokens: 8, seed: 4 };
found.samples = await client.chat.completions.create({ ...chat, ...sampled, n: 2 });
found.extras = await client.chat.completions.create({ ...chat, ...sampled, top_k: 4, min_p: 0.05 });
found.logprobs = await client.chat.completions.create({
  ...chat,
  ...greedy,
  logprobs: true,
  top_logprobs: 2,
});
found.models = (await client.models.list()).data;

async function errorOf(options) {
  try {
    await client.chat.completions.create({ ...chat, ...options });
    return null;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, param: error.param };
  }
}
found.unknownModel = await errorOf({ model: "other" });
found.badValue = await errorOf({ top_p: 7 });

const endless = await client.chat.completions.create({
  ...chat,
  max_tokens: 60000,
  ignore_eos: true,
  stream: true,
});
for await (const piece of endless) {
  found.begun = piece.object;
  break; // which aborts the request
}
console.log(JSON.stringify(found));
