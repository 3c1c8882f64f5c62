"""HTTP: the OpenAI routes, from a request's body to its last byte.

server      one frontend process: its socket, its start, its end
app         the application: what is registered, and errors in OpenAI's shape
routes      every operation: its handler, and what it takes and answers
openapi     /openapi.json from these and from the structs they name
docs        /openapi.json and the page /docs
answer_schema  what answers hold
service     what the routes share: the model, the engine, the state of the process
parse       bodies, bounded, to structs
schema      the fields of those structs
jobs        structs to prompts of ids and sampling parameters
structure   what an answer has to be like: text of a form, calls of tools
grammars    that as the engine takes it; formats, grammar_check and grammar_child are behind it
tools       the tools of a request; tool_formats: how models write calls; tool_calls: calls found in text
engine      the broker's peer: submits, takes in tokens, makes good what got lost
generation  what a call waits for
rows        the arrays of an Outputs message, row by row
sample      one sample's ids to text
answers     what OpenAI's clients expect of completions and chats
logprobs    the same of log-probabilities
generate    runs a call and sends its answer, whole or as a stream
stream      server-sent events
status      /health, /ready, /v1/models
"""
