// OpenAI's SDK for JavaScript: its runner of tools, streamed.
import OpenAI from "openai";

const client = new OpenAI();
const runner = client.chat.completions.runTools(
  {
    model: "policy",
    stream: true,
    messages: [{ role: "user", content: process.env.VIME_PROMPT }],
    tools: [
      {
        type: "function",
        function: {
          name: "sort_letters",
          description: "Sorts letters.",
          parameters: { type: "object", properties: { letters: { type: "string" } }, required: ["letters"] },
          parse: JSON.parse,
          function: ({ letters }) => [...String(letters)].sort().join(""),
        },
      },
    ],
  },
  { maxChatCompletions: 3 },
);
await runner.done();
