"""The reference kernel with its arithmetic compiled by torch: for the scorers that have no fused kernel."""
