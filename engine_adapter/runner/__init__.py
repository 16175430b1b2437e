"""What is put in front of vLLM's model runners, V1 and V2."""
