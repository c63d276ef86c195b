// How a client's cases are asked for: as in tests/clients/python/asked.py, with the same words.
import { createInterface } from "node:readline";

export const [URL, KEY] = process.argv.slice(2);
export const V1 = `${URL}/v1`;
export const MODEL = "tiny";
export const TEXT = "Hello. forced:text";
export const CALL = "Weather? forced:call";
export const CALLS = "Weather? forced:calls";
export const REASONING = "Weather? forced:reasoning";
export const OBJECT = "As JSON. forced:json";
export const FREE = "Weather? forced:thought"; // then the model itself answers, as a grammar lets it
export const TOO_LONG = "weather ".repeat(70_000);
export const CITIES = ["Paris", "Rome"];
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES } },
  required: ["city"],
  additionalProperties: false,
};
export const RESULT = "sunny";

export const user = (text) => [{ role: "user", content: text }];

// How the client reports what the server refuses.
export async function failure(call) {
  let got;
  try {
    got = await call();
  } catch (error) {
    const status = error.status ?? error.statusCode ?? null;
    return { error: error.constructor.name, status, code: error.code ?? null };
  }
  throw new Error(`no error: ${JSON.stringify(got)}`);
}

// Until the input ends. What a client prints goes to the standard error.
export async function answer(cases) {
  console.log = console.info = console.warn = console.error;
  for await (const line of createInterface({ input: process.stdin })) {
    let found;
    try {
      found = { value: line ? await cases[line]() : Object.keys(cases) };
    } catch (error) {
      found = { failure: `${error.stack}\n${error.cause?.stack ?? ""}` };
    }
    process.stdout.write(`${JSON.stringify(found)}\n`);
  }
}
