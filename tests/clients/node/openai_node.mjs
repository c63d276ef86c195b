// OpenAI's client for Node.js.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as asked from "./asked.mjs";
import { MODEL, user } from "./asked.mjs";

const made = (apiKey) => new OpenAI({ baseURL: asked.V1, apiKey, maxRetries: 0 });
const client = made(asked.KEY);
const City = z.object({ city: z.enum(asked.CITIES) });
const FUNCTION = { name: "get_weather", description: "of a city", parameters: asked.PARAMETERS };
const TOOLS = [{ type: "function", function: FUNCTION }];
const FLAT = [{ type: "function", strict: false, ...FUNCTION }];

const create = (prompt, more = {}) =>
  client.chat.completions.create({ model: MODEL, messages: user(prompt), ...more });
const callsOf = (message) =>
  (message.tool_calls ?? []).map((c) => [c.function.name, JSON.parse(c.function.arguments)]);
const flat = (items) =>
  items.filter((i) => i.type === "function_call").map((i) => [i.name, JSON.parse(i.arguments)]);

function expect(found, wanted) {
  if (JSON.stringify(found) !== JSON.stringify(wanted)) {
    throw new Error(`${JSON.stringify(found)}, not ${JSON.stringify(wanted)}`);
  }
}

async function stream() {
  const texts = [];
  let tokens = null;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await create(asked.TEXT, options)) {
    texts.push(...chunk.choices.map((each) => each.delta.content).filter(Boolean));
    tokens = chunk.usage?.completion_tokens ?? tokens;
  }
  return { text: texts.join(""), parts: texts.length, tokens };
}

async function called(prompt, more = {}) {
  const [choice] = (await create(prompt, { tools: TOOLS, ...more })).choices;
  expect(choice.finish_reason, "tool_calls");
  return { calls: callsOf(choice.message), text: choice.message.content };
}

// By the client's own helper, which joins the deltas.
async function toolsStreamed(prompt) {
  const events = client.chat.completions.stream({
    model: MODEL,
    messages: user(prompt),
    tools: TOOLS,
  });
  const [choice] = (await events.finalChatCompletion()).choices;
  expect(choice.finish_reason, "tool_calls");
  return { calls: callsOf(choice.message), text: choice.message.content || null };
}

// The helper calls the function, and sends its result: call, result, answer.
async function history() {
  const calls = [];
  const run = (given) => {
    calls.push(["get_weather", given]);
    return asked.RESULT;
  };
  const runner = client.chat.completions.runTools({
    model: MODEL,
    messages: user(asked.CALL),
    tools: [{ type: "function", function: { ...FUNCTION, function: run, parse: JSON.parse } }],
  });
  return { text: await runner.finalContent(), calls };
}

async function schema() {
  const done = await client.chat.completions.parse({
    model: MODEL,
    messages: user(asked.FREE),
    response_format: zodResponseFormat(City, "city"),
  });
  return done.choices[0].message.parsed;
}

async function jsonObject() {
  const done = await create(asked.OBJECT, { response_format: { type: "json_object" } });
  return JSON.parse(done.choices[0].message.content);
}

async function reasoning() {
  const { message } = (await create(asked.REASONING)).choices[0];
  return { reasoning: message.reasoning, text: message.content };
}

const respond = (input, more = {}) => client.responses.create({ model: MODEL, input, ...more });

async function responsesStream() {
  const texts = [];
  let tokens = null;
  for await (const event of await respond(asked.TEXT, { stream: true })) {
    if (event.type === "response.output_text.delta") texts.push(event.delta);
    if (event.type === "response.completed") tokens = event.response.usage.output_tokens;
  }
  return { text: texts.join(""), parts: texts.length, tokens };
}

async function responsesTools() {
  const input = user(asked.CALL);
  const first = await respond(input, { tools: FLAT });
  const [call] = first.output.filter((item) => item.type === "function_call");
  const result = { type: "function_call_output", call_id: call.call_id, output: asked.RESULT };
  const second = await respond([...input, ...first.output, result], { tools: FLAT });
  return { calls: flat(first.output), text: second.output_text };
}

async function responsesToolsStream() {
  const events = client.responses.stream({ model: MODEL, input: asked.CALLS, tools: FLAT });
  const last = await events.finalResponse();
  return { calls: flat(last.output), text: last.output_text };
}

async function responsesSchema() {
  const format = zodTextFormat(City, "city");
  const given = { model: MODEL, input: asked.FREE, text: { format } };
  return (await client.responses.parse(given)).output_parsed;
}

async function models() {
  const found = [];
  for await (const each of client.models.list()) found.push(each.id);
  return found;
}

const NAMED = { type: "function", function: { name: "get_weather" } };
await asked.answer({
  chat: async () => ({ text: (await create(asked.TEXT)).choices[0].message.content }),
  stream,
  tools: () => called(asked.CALL),
  tools_stream: () => toolsStreamed(asked.CALL),
  parallel: () => called(asked.CALLS),
  parallel_stream: () => toolsStreamed(asked.CALLS),
  history,
  required: () => called(asked.FREE, { tool_choice: "required", parallel_tool_calls: false }),
  named: () => called(asked.FREE, { tool_choice: NAMED, parallel_tool_calls: false }),
  schema,
  json_object: jsonObject,
  forbidden: () =>
    asked.failure(() => create(asked.TEXT, { response_format: { type: "json_object" } })),
  reasoning,
  responses: async () => ({ text: (await respond(asked.TEXT)).output_text }),
  responses_stream: responsesStream,
  responses_tools: responsesTools,
  responses_tools_stream: responsesToolsStream,
  responses_schema: responsesSchema,
  models,
  too_long: () => asked.failure(() => create(asked.TOO_LONG)),
  wrong_key: () => asked.failure(() => made("wrong").models.list()),
  full: () => asked.failure(() => create(asked.TEXT)),
});
