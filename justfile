# Recipes for people; `just` lists them. CI runs .ci/run, which calls none of these.

# Lists the recipes.
default:
    @just --list

# A cluster on this machine: router, one prefill worker, one decode worker, and the default model.
up *ARGS:
    cargo run --release --locked -- up {{ARGS}}

# Asks the running cluster.
chat *ARGS:
    cargo run --release --locked -- chat {{ARGS}}

# Loads the running cluster and prints percentiles.
bench *ARGS:
    cargo run --release --locked -- bench {{ARGS}}

# What a change must pass before it is sent, without the slow tests.
check: fmt-check clippy
    cargo test --locked -p baton-tests --test house

# Formats everything.
fmt:
    cargo fmt --all

# Fails where formatting differs.
fmt-check:
    cargo fmt --all --check

# Lints everything, tests included; a warning is an error.
clippy:
    cargo clippy --workspace --all-targets --locked -- -D warnings

# Licences, bans and sources of dependencies; needs cargo-deny.
deny:
    cargo deny --locked check bans licenses sources

# All tests. Starts real processes; takes minutes.
test *ARGS:
    cargo test --workspace --locked {{ARGS}}

# Everything that CI runs.
ci:
    .ci/run
