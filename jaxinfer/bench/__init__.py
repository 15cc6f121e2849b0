"""`python -m jaxinfer.bench COMMAND`: measurements, each command in a module of its own."""
