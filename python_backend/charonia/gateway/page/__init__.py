"""The page at `/`: chat with the model, and figures of its servers, without a build step.

routes      serves the files beside it
index.html  what is there; base.css, layout.css, talk.css, server.css  how it looks
main.js     wires it
talk.js     the conversation   ── turn.js  one prompt and its answer   ── text.js  texts as nodes
pace.js     what one answer took   ── format.js  numbers as texts   ── dom.js  makes nodes
panel.js    the servers' figures   ── figures.js  sums of servers   ── spark.js  a line of them
settings.js the parameters   ── store.js  what is remembered   ── theme.js  light and dark
api.js      calls of the gateway   ── key.js  asks for an API key

A text of the model is put into the page as text nodes alone, and the headers forbid scripts, styles
and connections of any other origin.
"""
