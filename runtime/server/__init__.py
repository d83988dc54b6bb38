"""An HTTP server that speaks the OpenAI API. Needs the extra `serve`."""
