"""The prefill service: computes prompts in chunks and hands their KV over."""
