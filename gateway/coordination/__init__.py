"""Several gateways in front of one fleet: replicas share the engines, and what they know, through Redis or Valkey."""
