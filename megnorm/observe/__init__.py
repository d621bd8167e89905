"""What a run shows: metrics.jsonl, TensorBoard, the console, baselines, pictures."""
