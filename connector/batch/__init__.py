"""A micro-batch: ``tx``, the steps on tables, and what follows the decision."""
