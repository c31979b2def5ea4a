"""OpenAI's API in front of charonia servers, in a process of its own without a state.

settings     what the operator chooses
server       the process: uvicorn, signals, draining
connections  what uvicorn does not bound
app          which path is served by what
observing    one record per request: its id, its line in the log, the metrics
watching     a request's work beside a watcher of its connection; errors that become answers
errors       what goes wrong, as OpenAI's clients know it
upstream     the servers behind: which one is asked, and when another one
breaker      which of them rests
prompts      texts to token ids and back, off the event loop
generation   one call of a client as requests of the scheduler, whole or as a stream
openai/      OpenAI's requests and answers

It knows servers through `charonia_client` alone, never an engine.
"""
