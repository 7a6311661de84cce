"""The five systems that Keel was built for; they use the core and nothing depends on them."""
