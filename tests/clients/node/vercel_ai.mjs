// Vercel's AI SDK: chat by @ai-sdk/openai-compatible, responses by @ai-sdk/openai.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import * as asked from "./asked.mjs";

const made = (apiKey) =>
  createOpenAICompatible({
    name: "kvline",
    baseURL: asked.V1,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  })(asked.MODEL);
const model = made(asked.KEY);
const plain = createOpenAICompatible({ name: "kvline", baseURL: asked.V1, apiKey: asked.KEY })(
  asked.MODEL,
);
const responses = createOpenAI({ baseURL: asked.V1, apiKey: asked.KEY })(asked.MODEL);
const City = z.object({ city: z.enum(asked.CITIES) });
const declared = { description: "of a city", inputSchema: City };
const tools = { get_weather: tool(declared) };
const running = { get_weather: tool({ ...declared, execute: async () => asked.RESULT }) };
const usual = { model, maxRetries: 0, maxOutputTokens: 200 };

const callsOf = (calls) => calls.map((each) => [each.toolName, each.input]);

// Errors of a stream are events of it; the first one is raised.
function streamed(given) {
  const errors = [];
  const result = streamText({ ...usual, ...given, onError: ({ error }) => errors.push(error) });
  const read = async () => {
    const texts = [];
    for await (const text of result.textStream) texts.push(text);
    if (errors.length) throw errors[0];
    return texts;
  };
  return { result, read };
}

async function generated(given) {
  const done = await generateText({ ...usual, ...given });
  return { calls: callsOf(done.toolCalls), text: done.text || null };
}

async function stream(of = model) {
  const { result, read } = streamed({ model: of, prompt: asked.TEXT });
  const texts = await read();
  const { outputTokens } = await result.usage;
  return { text: texts.join(""), parts: texts.length, tokens: outputTokens };
}

async function toolsStreamed(prompt) {
  const { result, read } = streamed({ prompt, tools });
  const texts = await read();
  return { calls: callsOf(await result.toolCalls), text: texts.join("") || null };
}

// The SDK calls the function, and sends its result: call, result, answer.
async function history(of = model) {
  const given = { model: of, prompt: asked.CALL, tools: running, stopWhen: isStepCount(3) };
  const done = await generateText({ ...usual, ...given });
  return { calls: callsOf(done.steps.flatMap((step) => step.toolCalls)), text: done.text };
}

async function historyStreamed() {
  const { result, read } = streamed({
    prompt: asked.CALL,
    tools: running,
    stopWhen: isStepCount(3),
  });
  const texts = await read();
  const steps = await result.steps;
  return { calls: callsOf(steps.flatMap((step) => step.toolCalls)), text: texts.join("") };
}

async function object(of, prompt, output) {
  return (await generateText({ ...usual, model: of, prompt, output })).output;
}

async function reasoning() {
  const done = await generateText({ ...usual, prompt: asked.REASONING });
  return { reasoning: done.reasoningText, text: done.text };
}

const chat = (of) => generateText({ ...usual, model: of, prompt: asked.TEXT });
const providerOptions = { kvline: { parallel_tool_calls: false } };
const ONE = { prompt: asked.FREE, tools, providerOptions };
const NAMED = { type: "tool", toolName: "get_weather" };
await asked.answer({
  chat: async () => ({ text: (await chat(model)).text }),
  stream: () => stream(),
  tools: () => generated({ prompt: asked.CALL, tools }),
  tools_stream: () => toolsStreamed(asked.CALL),
  parallel: () => generated({ prompt: asked.CALLS, tools }),
  parallel_stream: () => toolsStreamed(asked.CALLS),
  history: () => history(),
  history_stream: historyStreamed,
  required: () => generated({ ...ONE, toolChoice: "required" }),
  named: () => generated({ ...ONE, toolChoice: NAMED }),
  schema: () => object(model, asked.FREE, Output.object({ schema: City })),
  json_object: () => object(plain, asked.OBJECT, Output.object({ schema: City })),
  reasoning,
  responses: async () => ({ text: (await chat(responses)).text }),
  responses_stream: () => stream(responses),
  responses_tools: () => history(responses),
  responses_schema: () => object(responses, asked.FREE, Output.object({ schema: City })),
  too_long: () => asked.failure(() => generateText({ ...usual, prompt: asked.TOO_LONG })),
  wrong_key: () => asked.failure(() => chat(made("wrong"))),
  full: () => asked.failure(() => chat(model)),
});
