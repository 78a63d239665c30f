"""ATen to the IR: a table of rules, op by op."""
