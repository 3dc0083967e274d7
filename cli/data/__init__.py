"""Commands on token shards: pack text into them, check them, fetch them."""
