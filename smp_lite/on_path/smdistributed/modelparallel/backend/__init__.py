"""Where SageMaker's training toolkit looks for error classes."""
