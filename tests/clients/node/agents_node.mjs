// OpenAI's Agents SDK for Node.js, with both of its model classes.
import {
  Agent,
  OpenAIChatCompletionsModel,
  OpenAIResponsesModel,
  Runner,
  setTracingDisabled,
  tool,
} from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import * as asked from "./asked.mjs";

setTracingDisabled(true);
const made = (apiKey) => new OpenAI({ baseURL: asked.V1, apiKey, maxRetries: 0 });
const runner = new Runner({ tracingDisabled: true });
const client = made(asked.KEY);
const chats = new OpenAIChatCompletionsModel(client, asked.MODEL);
const responses = new OpenAIResponsesModel(client, asked.MODEL);
const City = z.object({ city: z.enum(asked.CITIES) });

// An agent with one tool, and the calls that it has had.
function weather(model, more = {}) {
  const calls = [];
  const get_weather = tool({
    name: "get_weather",
    description: "of a city",
    parameters: City,
    execute: async (given) => {
      calls.push(["get_weather", given]);
      return asked.RESULT;
    },
  });
  const agent = new Agent({ name: "weather", model, tools: [get_weather], ...more });
  return { agent, calls };
}

const plain = (model, more = {}) => new Agent({ name: "plain", model, ...more });
const run = async (agent, prompt) => (await runner.run(agent, prompt)).finalOutput;

async function history(model) {
  const { agent, calls } = weather(model);
  return { text: await run(agent, asked.CALL), calls };
}

async function streamed(agent, prompt) {
  const result = await runner.run(agent, prompt, { stream: true });
  const texts = [];
  for await (const text of result.toTextStream()) texts.push(text);
  await result.completed;
  return texts;
}

async function stream(model) {
  const texts = await streamed(plain(model), asked.TEXT);
  return { text: texts.join(""), parts: texts.length };
}

async function historyStreamed() {
  const { agent, calls } = weather(chats);
  return { text: (await streamed(agent, asked.CALL)).join(""), calls };
}

// The run ends with the tool's result, which a required call would have follow for ever.
async function required() {
  const settings = { toolChoice: "required", parallelToolCalls: false };
  const { agent, calls } = weather(chats, {
    modelSettings: settings,
    toolUseBehavior: "stop_on_first_tool",
  });
  await run(agent, asked.FREE);
  return { calls };
}

const wrong = () => plain(new OpenAIChatCompletionsModel(made("wrong"), asked.MODEL));
await asked.answer({
  chat: async () => ({ text: await run(plain(chats), asked.TEXT) }),
  stream: () => stream(chats),
  history: () => history(chats),
  history_stream: historyStreamed,
  required,
  schema: () => run(plain(chats, { outputType: City }), asked.FREE),
  responses: async () => ({ text: await run(plain(responses), asked.TEXT) }),
  responses_stream: () => stream(responses),
  responses_tools: () => history(responses),
  responses_schema: () => run(plain(responses, { outputType: City }), asked.FREE),
  too_long: () => asked.failure(() => run(plain(chats), asked.TOO_LONG)),
  wrong_key: () => asked.failure(() => run(wrong(), asked.TEXT)),
  full: () => asked.failure(() => run(plain(chats), asked.TEXT)),
});
