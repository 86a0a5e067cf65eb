"""`ktft serve`: vLLM serves a model whose routed experts ktft computes."""
