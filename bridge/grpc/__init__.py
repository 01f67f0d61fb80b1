"""The gRPC server: HTTP/2 on nghttp2, one write per connection per engine step."""
