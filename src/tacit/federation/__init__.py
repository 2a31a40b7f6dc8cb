"""Parties that learn together without showing each other their triples: messages, aggregations, rounds."""
