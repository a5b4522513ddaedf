// SPDX-License-Identifier: Apache-2.0
//! Where the bytes of a page lie in a pool.
//!
//! Each layer has one or more extents (K and V, or one for MLA). Page `p` of an extent is the `page_bytes` bytes at
//! `base_bytes + p * stride_bytes`. Extents do not overlap.
//!
//! Two shapes: in a *packed* pool every extent holds its pages one after another (stride = page); in a *framed* one all
//! layers of a page lie together, a Full Block, and every stride is the size of a frame.

use crate::error::{Result, invalid};
use crate::frame::FrameId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub base_bytes: u64,
    pub page_bytes: u64,
    pub stride_bytes: u64,
}

impl Extent {
    /// Offset of a page in the pool. Does not overflow for a page below the geometry's capacity.
    pub fn offset(&self, page: FrameId) -> usize {
        (self.base_bytes + u64::from(page) * self.stride_bytes) as usize
    }

    /// Are adjacent pages adjacent bytes?
    pub fn is_packed(&self) -> bool {
        self.stride_bytes == self.page_bytes
    }
}

/// Extents per layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Geometry {
    pub layers: Vec<Vec<Extent>>,
}

impl Geometry {
    /// From `(base_bytes, page_bytes)` of each extent of each layer: packed, or framed when the size of a frame is
    /// given.
    pub fn new(layers: &[Vec<(u64, u64)>], frame_bytes: Option<u64>) -> Self {
        let extent = |&(base_bytes, page_bytes): &(u64, u64)| Extent {
            base_bytes,
            page_bytes,
            stride_bytes: frame_bytes.unwrap_or(page_bytes),
        };
        Self {
            layers: layers
                .iter()
                .map(|layer| layer.iter().map(extent).collect())
                .collect(),
        }
    }

    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of one page over all layers.
    pub fn page_bytes(&self) -> u64 {
        self.extents().map(|extent| extent.page_bytes).sum()
    }

    /// Where a layer begins in a Full Block: the layers one after another without gaps.
    pub fn offset_in_block(&self, layer: usize) -> u64 {
        let before = self.layers[..layer].iter().flatten();
        before.map(|extent| extent.page_bytes).sum()
    }

    /// How many pages fit. Packed: every extent ends where the next one begins, the last at the end of the pool.
    /// Framed: every extent of a frame does, the last at its end, and the pool holds whole frames.
    pub fn capacity(&self, pool_bytes: u64) -> Result<u64> {
        let mut extents: Vec<Extent> = self.extents().collect();
        if extents.is_empty() || self.layers.iter().any(Vec::is_empty) {
            return invalid!(
                "geometry of {} layers has a layer without extents",
                self.num_layers()
            );
        }
        extents.sort_by_key(|extent| extent.base_bytes);
        if extents.iter().all(Extent::is_packed) {
            return capacity_packed(&extents, pool_bytes);
        }
        let frame_bytes = extents[0].stride_bytes;
        if extents
            .iter()
            .any(|extent| extent.stride_bytes != frame_bytes)
        {
            return invalid!("geometry has extents of different strides");
        }
        let packed: Vec<Extent> = extents
            .iter()
            .map(|extent| Extent {
                stride_bytes: extent.page_bytes,
                ..*extent
            })
            .collect();
        if capacity_packed(&packed, frame_bytes)? == 0 {
            return invalid!(
                "the extents of a page do not fit into a frame of {frame_bytes} bytes"
            );
        }
        Ok(pool_bytes / frame_bytes)
    }

    /// May pages be copied between pools of these two shapes? Bases and strides may differ, the rest must agree.
    pub fn exchanges_with(&self, other: &Self) -> bool {
        self.num_layers() == other.num_layers()
            && self.layers.iter().zip(&other.layers).all(|(mine, theirs)| {
                mine.len() == theirs.len()
                    && mine
                        .iter()
                        .zip(theirs)
                        .all(|(mine, theirs)| mine.page_bytes == theirs.page_bytes)
            })
    }

    /// As words for a frame table: per layer the number of extents, then base, page size and stride of each.
    pub fn to_words(&self) -> Vec<u64> {
        let mut words = Vec::new();
        for layer in &self.layers {
            words.push(layer.len() as u64);
            for extent in layer {
                words.extend([extent.base_bytes, extent.page_bytes, extent.stride_bytes]);
            }
        }
        words
    }

    /// Inverse of `to_words`; `None` if the words are no geometry of `num_layers`.
    pub fn from_words(words: &[u64], num_layers: usize) -> Option<Self> {
        let mut rest = words.iter().copied();
        let mut layers = Vec::new();
        for _ in 0..num_layers {
            let num_extents = rest.next()?;
            let mut layer = Vec::new();
            for _ in 0..num_extents {
                layer.push(Extent {
                    base_bytes: rest.next()?,
                    page_bytes: rest.next()?,
                    stride_bytes: rest.next()?,
                });
            }
            layers.push(layer);
        }
        rest.next().is_none().then_some(Self { layers })
    }

    fn extents(&self) -> impl Iterator<Item = Extent> {
        self.layers.iter().flatten().copied()
    }
}

/// Pages of packed extents, sorted by base, that fit into `pool_bytes`.
fn capacity_packed(extents: &[Extent], pool_bytes: u64) -> Result<u64> {
    let ends = extents[1..].iter().map(|next| next.base_bytes);
    let mut capacity = u64::MAX;
    for (extent, end) in extents.iter().zip(ends.chain([pool_bytes])) {
        if extent.page_bytes == 0 {
            return invalid!("geometry has an extent with pages of 0 bytes");
        }
        let Some(room) = end.checked_sub(extent.base_bytes) else {
            return invalid!(
                "extent at byte {} begins behind the pool of {pool_bytes} bytes",
                extent.base_bytes
            );
        };
        capacity = capacity.min(room / extent.page_bytes);
    }
    Ok(capacity)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(layers: &[&[(u64, u64)]]) -> Geometry {
        let layers: Vec<Vec<(u64, u64)>> = layers.iter().map(|layer| layer.to_vec()).collect();
        Geometry::new(&layers, None)
    }

    fn framed(layers: &[&[(u64, u64)]], frame_bytes: u64) -> Geometry {
        let layers: Vec<Vec<(u64, u64)>> = layers.iter().map(|layer| layer.to_vec()).collect();
        Geometry::new(&layers, Some(frame_bytes))
    }

    #[test]
    fn capacity_when_framed_then_whole_frames() {
        let shape = framed(&[&[(0, 10), (10, 20)], &[(32, 10)]], 48);
        assert_eq!(shape.capacity(48 * 3 + 47).unwrap(), 3);
        assert_eq!(shape.layers[1][0].offset(2), 2 * 48 + 32);
        assert!(
            framed(&[&[(0, 10)], &[(32, 20)]], 48)
                .capacity(480)
                .is_err()
        );
        assert!(framed(&[&[(0, 10)], &[(5, 10)]], 48).capacity(480).is_err());
        assert!(framed(&[&[(0, 10)]], 0).capacity(480).is_err());
    }

    #[test]
    fn exchange_when_one_is_framed_then_allowed() {
        let packed = geometry(&[&[(0, 10), (100, 20)]]);
        assert!(packed.exchanges_with(&framed(&[&[(0, 10), (10, 20)]], 32)));
    }

    #[test]
    fn capacity_when_extents_follow_each_other_then_the_tightest_counts() {
        let shape = geometry(&[&[(0, 10), (100, 20)], &[(300, 10)]]);
        assert_eq!(shape.capacity(1000).unwrap(), 10);
        assert_eq!(shape.capacity(345).unwrap(), 4);
        assert!(shape.capacity(299).is_err());
    }

    #[test]
    fn words_when_read_back_then_equal() {
        let shape = geometry(&[&[(0, 10), (100, 20)], &[(300, 10)]]);
        assert_eq!(
            Geometry::from_words(&shape.to_words(), 2),
            Some(shape.clone())
        );
        assert_eq!(Geometry::from_words(&shape.to_words(), 1), None);
        assert_eq!(Geometry::from_words(&shape.to_words(), 3), None);
    }

    #[test]
    fn exchange_when_only_bases_differ_then_allowed() {
        let one = geometry(&[&[(0, 10), (100, 20)]]);
        assert!(one.exchanges_with(&geometry(&[&[(64, 10), (900, 20)]])));
        assert!(!one.exchanges_with(&geometry(&[&[(0, 10), (100, 24)]])));
        assert!(!one.exchanges_with(&geometry(&[&[(0, 10)]])));
    }
}
