/* SPDX-License-Identifier: Apache-2.0 */
/*
 * digest: XXH3-128 (integrity, identity) and SHA-256 (the chat template's, as the reference records
 * it), as lower-case hex.
 */
#ifndef DSPARK_DIGEST_H
#define DSPARK_DIGEST_H

#include <stddef.h>
#include <stdint.h>

struct err;

#define DIGEST_HEX 33		/* 32 digits and NUL; canonical (big-endian), as xxhsum -H2 */
#define SHA256_HEX 65

void digest_xxh3(char hex[DIGEST_HEX], const void *buf, size_t n);

/* Streaming form; digest_free on NULL does nothing. */
struct digest;
struct digest *digest_new(struct err *e);
void digest_reset(struct digest *d);
void digest_update(struct digest *d, const void *buf, size_t n);
void digest_hex(const struct digest *d, char hex[DIGEST_HEX]);	/* more may follow */
void digest_free(struct digest *d);

void digest_sha256(char hex[SHA256_HEX], const void *buf, size_t n);

#endif
