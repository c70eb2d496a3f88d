"""Our attention inside of other libraries."""
