// Calls the gateway with the AI SDK, and prints what it got as JSON.
// node ai_sdk.mjs BASE_URL STOP
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [baseURL, stop] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "charonia",
  baseURL,
  apiKey: "none",
  includeUsage: true,
});
const greedy = { temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const ask = { model: provider("small"), system: "Be brief.", prompt: "Hi", ...greedy };
const found = {};

function plain({ text, finishReason, usage }) {
  return { text, finishReason, usage };
}
async function streamed(options) {
  const result = streamText({ onError() {}, ...options });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  return { text, finishReason: await result.finishReason, usage: await result.usage };
}

found.whole = plain(await generateText(ask));
found.streamed = await streamed(ask);
const complete = { model: provider.completionModel("small"), prompt: "Hi", ...greedy };
found.completion = plain(await generateText(complete));
found.completionStreamed = await streamed(complete);
found.stopped = plain(await generateText({ ...ask, stopSequences: [stop] }));
found.extras = plain(
  await generateText({
    ...ask,
    temperature: 1.1,
    seed: 4,
    providerOptions: { charonia: { top_k: 4, min_p: 0.05 } },
  }),
);

async function errorOf(options) {
  try {
    await generateText({ ...ask, ...options });
    return null;
  } catch (error) {
    return { name: error.name, status: error.statusCode, message: error.message };
  }
}
found.unknownModel = await errorOf({ model: provider("other") });
found.badValue = await errorOf({ topP: 7 });

const controller = new AbortController();
const endless = streamText({
  ...ask,
  maxOutputTokens: 60000,
  providerOptions: { charonia: { ignore_eos: true } },
  abortSignal: controller.signal,
  onError() {},
});
for await (const piece of endless.textStream) {
  found.begun = piece.length > 0;
  controller.abort();
  break;
}
console.log(JSON.stringify(found));
