// Streams through OpenAI's client for Node: `node sdk.mjs URL`, with what came of them as JSON on stdout.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0, timeout: 30_000 });
const model = "default";
const messages = [{ role: "user", content: "Hello" }];
const parameters = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { name: "get_weather", description: "Of a city.", parameters };

async function chat() {
  let text = "";
  let usage = null;
  const asked = { model, messages, max_tokens: 16, temperature: 0, stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create(asked)) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  return { text, tokens: usage.completion_tokens };
}

async function tools() {
  const tools = [{ type: "function", function: weather }];
  const asked = { model, messages, tools, tool_choice: "required", parallel_tool_calls: false, temperature: 0 };
  const stream = client.chat.completions.stream(asked);
  let deltas = 0;
  stream.on("tool_calls.function.arguments.delta", () => (deltas += 1));
  const [choice] = (await stream.finalChatCompletion()).choices;
  return { deltas, reason: choice.finish_reason, calls: choice.message.tool_calls.map((each) => each.function) };
}

async function responses() {
  const stream = client.responses.stream({ model, input: "Hello", max_output_tokens: 16, temperature: 0 });
  const kinds = [];
  let text = "";
  for await (const event of stream) {
    kinds.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  return { kinds, text };
}

async function responseTools() {
  const tools = [{ type: "function", strict: true, ...weather }];
  const stream = client.responses.stream({
    model, input: "Hello", tools, tool_choice: "required", parallel_tool_calls: false, temperature: 0,
  });
  let written = "";
  stream.on("response.function_call_arguments.delta", (event) => (written += event.delta));
  const [call] = (await stream.finalResponse()).output;
  return { written, name: call.name, arguments: call.arguments };
}

const found = { chat: await chat(), tools: await tools(), responses: await responses(), responseTools: await responseTools() };
console.log(JSON.stringify(found));
