"""From a model name to a clean graph: resolving, lazy weights, tokenizer, torch.export."""
