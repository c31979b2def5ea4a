"""OpenAI's API in front of charonia servers. It is a process of its own, without state.

settings     what the operator configures
server       the process: uvicorn, signals, draining
connections  bounds on connections that uvicorn does not have
app          the routes
routes       what each route takes and answers, with examples
openapi      the OpenAPI document, made of these; openapi.json is a copy of it
keys         who may call: API keys, and the tenant of each
observing    one record per request: its id, its log line, the metrics
figures      the figures of /v1/metrics
watching     runs a request's work, watches its connection, turns errors into answers
errors       errors in OpenAI's form
upstream     the servers behind: which one gets a request, and when another one is tried
breaker      the circuit breaker of a server
prompts      converts texts to token ids and back, off the event loop
generation   one client call as requests of the scheduler, whole or as a stream
serving      what every request for text needs, and when the fallback model answers
fields       reads and checks a request
sampling     the sampling parameters that both APIs have
openai/      OpenAI's requests and answers
page/        the page at `/`
rest/        a plain REST API

It knows servers only through `charonia_client`, never an engine.
"""
